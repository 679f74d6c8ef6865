"""Assemble the text of one sequence from the engine's events: detokenize, stop at stop strings, mark delimiters."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jswa.plan import TokenEvent
from jswa.text.detokenizer import StreamDecoder
from jswa.text.stop_strings import StopStrings, StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

# Stands before the text of a delimiter token. It is half of a surrogate pair, which no tokenizer decodes to.
MARK = "\ud800"
_NO_TOKENS: Mapping[int, str] = MappingProxyType({})


class Assembler:
    """The text of one sequence, piece by piece.

    Attributes:
        tokens: generated tokens so far, a stop token included.
        offset: characters decoded so far, including those held back because they may begin a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Int[np.ndarray, " P"],
        params: SamplingParams,
        stops: StopTable,
        *,
        delimiters: Mapping[int, str] = _NO_TOKENS,
        hidden: Collection[int] = (),
    ) -> None:
        """Begin behind a prompt.

        Args:
            tokenizer: None if the checkpoint has none: then all pieces are empty.
            stops: the table of the parameters' stop strings.
            delimiters: texts of the tokens that delimit the parts of an answer, by id. Each of them stands in the
                text behind a MARK. Stop strings are searched in the text between them.
            hidden: with delimiters, the ids of all special tokens, of which `skip_special_tokens` removes the others.
        """
        self.tokens = 0
        self.offset = 0
        self._min_tokens = params.min_tokens
        self._stops = StopStrings(stops, include=params.include_stop_str_in_output)
        self._delimiters = delimiters
        skips = params.skip_special_tokens
        self._hidden = frozenset(hidden) - delimiters.keys() if delimiters and skips else frozenset()
        self._decoder = (
            None
            if tokenizer is None
            else StreamDecoder(tokenizer, prompt, skip_special_tokens=skips and not delimiters)
        )

    @property
    def stopped(self) -> str | None:
        """The stop string at which the text ends, if it does."""
        return self._stops.stopped

    def push(self, event: TokenEvent) -> str:
        """Return the characters that an event adds to the text.

        A stop token adds none, unless it is a delimiter. The last event adds the characters that were held back.
        """
        if self._decoder is None:
            self.tokens += event.token is not None
            return ""
        text, delimiter = "", ""
        if event.token is not None:
            if not event.is_stop_token:
                text, delimiter = self._token(event.token)
            else:
                delimiter = self._delimiters.get(event.token, "")
            self.tokens += 1
        if event.finish_reason is not None or delimiter:
            text += self._stops.push(self._decoder.finish() if event.finish_reason is not None else "")
            text += self._stops.finish()
        return text + MARK + delimiter if delimiter and self.stopped is None else text

    def add(self, token: int) -> str:
        """Return the characters that a token adds to the text, which goes on behind it."""
        if self._decoder is None or token in self._delimiters or token in self._hidden:
            return self.push(TokenEvent("", token))
        self.tokens += 1
        piece = self._decoder.push(token)
        self.offset += len(piece)
        return self._stops.push(piece) if self.tokens > self._min_tokens else piece

    def _token(self, token: int) -> tuple[str, str]:
        """Return the text that a token completes, and the delimiter that it is, if it is one."""
        assert self._decoder is not None
        if token in self._hidden:
            return "", ""
        piece = self._decoder.push(token)
        self.offset += len(piece)
        delimiter = self._delimiters.get(token, "")
        piece = piece.removesuffix(delimiter)
        # As in vLLM, text of the first min_tokens tokens cannot stop.
        return (self._stops.push(piece) if self.tokens >= self._min_tokens else piece), delimiter
