"""The matrices of a mixture of experts: the call (`api`), groups of rows, activations, weights of 4 bits."""
