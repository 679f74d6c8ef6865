"""What all forms stand on: the names of parameters, what a form is, and where its arrays lie."""
