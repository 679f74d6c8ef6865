"""Text and token ids: tokenizer, detokenizer, stop strings, special tokens, chat templates, inputs of calls. No jax."""
