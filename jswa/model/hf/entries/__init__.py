"""The entries of the families, grouped as their parsers are; `jswa.model.hf.families` has them all."""
