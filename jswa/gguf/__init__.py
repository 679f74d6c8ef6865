"""Checkpoints in GGUF, llama.cpp's file format, seen as the Hugging Face folders that they stand for.

file             the checked headers of the files; types and rows of tensors
families         config.json of each architecture, from its metadata
architectures    the table of architectures: configs, names of tensors, what a converter has changed
made, stacks, tensors    transformers' tensors, made of rows of GGUF tensors
tokenizer, vocabulary    tokenizer.json and tokenizer_config.json of the metadata
checkpoint       all of it: config.json, generation_config.json and tensors of a file
outline          the headers of files that are elsewhere
pointer, view    the folder in jswa's cache that stands for a file
"""
