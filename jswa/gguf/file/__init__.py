"""One GGUF file, or its parts: headers, types and rows. Knows nothing of models."""
