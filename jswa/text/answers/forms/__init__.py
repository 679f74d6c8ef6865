"""Read the forms in which families write tool calls. Each reader takes a time proportional to the text."""
