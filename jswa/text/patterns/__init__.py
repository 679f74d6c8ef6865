"""Find regular expressions in streamed text, one step for each character, whatever the expressions are."""
