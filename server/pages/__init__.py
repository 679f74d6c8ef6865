"""The pages of the server: a chat at /, the KV cache at /live."""
