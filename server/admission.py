"""The bounded queue: what may wait for its first token, by count and by prompt tokens. Beyond that: 429."""

from .errors import ApiError


class Admission:
    """Counts texts that have been accepted and have no token yet."""

    def __init__(self, most_texts: int, most_tokens: int) -> None:
        self.texts = 0
        self.tokens = 0
        self.refused = 0
        self._most_texts = most_texts
        self._most_tokens = most_tokens

    def enter(self, texts: int, tokens: int) -> None:
        """Take texts with so many prompt tokens. An empty queue takes any one request. Raises ApiError."""
        full = self.texts + texts > self._most_texts or self.tokens + tokens > self._most_tokens
        if full and self.texts:
            self.refused += 1
            raise ApiError(
                429,
                f"the queue is full: {self.texts} texts with {self.tokens} prompt tokens wait; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.texts += texts
        self.tokens += tokens

    def leave(self, texts: int, tokens: int) -> None:
        """These have their first token, or have ended."""
        self.texts -= texts
        self.tokens -= tokens
