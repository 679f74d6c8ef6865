"""Which routes there are, who may call them, and the gate in front of them."""
