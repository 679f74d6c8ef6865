"""What `grouped.grouped_matmul` is made of: groups, activations, weights of 4 bits, the Hopper kernel, cases."""
