"""Images in prompts: rows that the model reads in place of the embeddings of their tokens."""
