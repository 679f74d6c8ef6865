"""Hugging Face formats: config.json, tensor names and adapter_config.json.

config, families                 config.json -> ModelConfig; all families by model_type
entries, family                  one entry per model_type, grouped as the parsers are
dense, gemma, gemma4, blocks,    parsers of the families, grouped by kinship
  mixture, gated
common, fields, rope             what the parsers share: common keys, typed reading of keys, rotary embeddings
quantization                     quantization_config
tensor_names, tensor_map         tensor names by family; the checkpoint tensors that each parameter is made of
assemble                         checkpoint tensors -> one parameter
peft                             adapter_config.json of LoRA adapters
"""
