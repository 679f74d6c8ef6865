"""The routes: OpenAI's completions and chat completions, tokenization, and administration."""
