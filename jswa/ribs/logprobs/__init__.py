"""Log probabilities of generated tokens and of prompts: `logprobs` and `prompt_logprobs` of a request."""
