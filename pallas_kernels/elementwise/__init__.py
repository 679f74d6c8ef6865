"""The small operations between products and attention: norms, residuals, rotary embedding, KV writes."""
