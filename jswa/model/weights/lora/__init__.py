"""Adapters from PEFT's folders: checked headers, then numbers."""
