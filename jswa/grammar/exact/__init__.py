"""Schemas as llguidance reads them: without what restricts nothing, and so that it admits no value that is none."""
