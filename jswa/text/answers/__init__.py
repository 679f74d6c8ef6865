"""Read generated text as an answer: its reasoning, its content and its tool calls, by a response template."""
