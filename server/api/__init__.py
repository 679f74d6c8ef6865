"""The routes: OpenAI's completions and chat, tokenization, and administration."""
