"""The decoder: config.json to ModelConfig, safetensors to parameters, parameters and tokens to logits."""
