"""How options are read: those that are JSON, and those of LoRA adapters."""
