"""A language model without weights."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jswa.plan import NOT_FINITE
from jswa.types import FinishReason


@dataclass
class TextModel:
    """A language model without weights: the next token is a hash of all tokens before it.

    Attributes:
        vocab: size of the vocabulary.
        failures: one of this many histories gives KV and logits that are not finite; 0 for none.
    """

    vocab: int
    failures: int = 0

    @staticmethod
    def fold(state: int, tokens: Sequence[int]) -> int:
        """Return the state after more tokens; the state of no tokens is 0."""
        for token in tokens:
            state = ((state ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64
        return state

    def next_token(self, state: int) -> int:
        """Return the token that follows a history, or NOT_FINITE for a history that fails."""
        if self.failures and (state >> 11) % self.failures == 0:
            return NOT_FINITE
        return (state >> 33) % self.vocab

    def finite(self, state: int, most: int) -> list[int]:
        """Return up to `most` tokens that follow a history, before the first whose own history fails."""
        tokens: list[int] = []
        while len(tokens) < most and (token := self.next_token(state)) != NOT_FINITE:
            state = self.fold(state, [token])
            if self.next_token(state) == NOT_FINITE:
                break
            tokens.append(token)
        return tokens

    def generate(self, prompt: Sequence[int], stop_ids: Collection[int], length: int) -> tuple[list[int], FinishReason]:
        """Return the tokens of a request that runs alone, `length` tokens with its prompt at most, and why it ends."""
        tokens: list[int] = []
        state = 0
        for token in prompt:
            state = self.fold(state, [token])
            if self.next_token(state) == NOT_FINITE:
                return tokens, "error"
        while len(prompt) + len(tokens) < length:
            token = self.next_token(state)
            if token == NOT_FINITE:
                return tokens, "error"
            tokens.append(token)
            if token in stop_ids:
                return tokens, "stop"
            state = self.fold(state, [token])
        return tokens, "length"
