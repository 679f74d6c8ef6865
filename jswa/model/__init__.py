"""The decoder, its weights, and the Hugging Face formats that both are read from.

transformer    the decoder, built from layers, attention, moe and altup (Gemma 3n)
lora           the product of LoRA adapters beside a matrix; adapters: which of them are loaded, and where
partition      tensor parallelism: the shard of each parameter; collectives: sums over the devices
hf/            config.json -> ModelConfig, one entry per family; which checkpoint tensors make which parameter
weights/       safetensors, converted checkpoints and LoRA folders -> parameters on devices; (de)quantization
"""
