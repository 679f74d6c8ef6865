"""Processes that work on what strangers have written, have limits, and can be killed."""
