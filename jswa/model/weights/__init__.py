"""Weights of a checkpoint, from files to parameters on devices; `load` is the entry.

safetensors_header, safetensors_files    checked headers; rows of tensors
dequantize, kv_scales                    fp8, int8 and MXFP4 tensors -> numbers; scales of a quantized KV cache
quantize, formats, packed                rounding to 8 bits at load time; which form a matrix gets, how it is read
placement                                parameters to devices, each device its tensor parallel shard
converted                                checkpoints that `jswa convert` wrote
lora/                                    LoRA adapters in PEFT folders
"""
