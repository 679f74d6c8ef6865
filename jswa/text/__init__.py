"""Text and token ids: tokenizer, special tokens, chat templates, and the prompts that callers may pass. No jax."""
