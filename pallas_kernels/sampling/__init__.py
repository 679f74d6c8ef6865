"""Sampling on GPUs: from a step's logits to tokens and log probabilities, in two kernels."""
