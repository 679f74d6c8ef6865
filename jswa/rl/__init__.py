"""Rollouts for reinforcement learning: texts with their log probabilities, and the same numbers by scoring."""
