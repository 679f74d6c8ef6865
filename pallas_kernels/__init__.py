"""Attention over paged KV: arrays in, arrays out. Knows pages, windows and ragged rows; nothing of requests."""
