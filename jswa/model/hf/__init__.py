"""What Hugging Face checkpoints say, family by family: config keys and tensor names."""
