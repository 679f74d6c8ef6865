"""How large a form may be. It is counted before llguidance sees it, which does not bound all of its own work."""
