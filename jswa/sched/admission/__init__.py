"""How waiting requests begin, and which prompts get the tokens of a step."""
