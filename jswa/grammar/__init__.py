"""Output that is held to a grammar: specifications, their checks, compiled grammars and the masks they give."""
