"""The vocabulary of a GGUF file: its tokens, its merges, and how text is split before merges apply."""
