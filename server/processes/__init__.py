"""Front ends in processes of their own: what they and the engine's process say to each other, and who starts them."""
