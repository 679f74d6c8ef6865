"""A language model without weights, and the keys that a query of it sees."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jswa.architecture import Reach
from jswa.plan import FROM_DEVICE, NOT_FINITE
from jswa.types import FinishReason


def first_seen(reach: Reach, position: int) -> int:
    """Return the oldest key of a query: of the last `size` keys, or of its chunks. Not the engine's function."""
    if reach.chunked:
        return max(0, position - position % reach.size - reach.lookback * reach.size)
    return max(0, position + 1 - reach.size)


class Run(NamedTuple):
    """What a row runs in a step: tokens of its text, of which so many drafts, and `wrong` drafts behind them."""

    start: int
    tokens: list[int]
    drafts: list[int]
    wrong: int

    @property
    def end(self) -> int:
        """One past the last position of the text."""
        return self.start + len(self.tokens)


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

    def run(self, state: int, start: int, tokens: list[int], advance: Callable[[int], int]) -> Run:
        """Return what a row runs behind a history: its tokens, and of drafts (FROM_DEVICE) as many as `advance` says.

        The first token whose history fails is no draft that is right: the step after it begins there.
        """
        if FROM_DEVICE not in tokens[1:]:
            return Run(start, tokens, [], 0)
        assert set(tokens[1:]) == {FROM_DEVICE}, "a draft lies before a token of the text"
        most, drafts, state = advance(len(tokens)) - 1, list[int](), self.fold(state, tokens[:1])
        while len(drafts) < most and (token := self.next_token(state)) != NOT_FINITE:
            state = self.fold(state, [token])
            if self.next_token(state) == NOT_FINITE:
                break
            drafts.append(token)
        return Run(start, [*tokens[:1], *drafts], drafts, len(tokens) - 1 - len(drafts))

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
