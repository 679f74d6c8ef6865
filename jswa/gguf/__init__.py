"""Checkpoints in GGUF, llama.cpp's file format, seen as the Hugging Face folders that they stand for.

header          the checked header of one file: metadata and tensors
"""
