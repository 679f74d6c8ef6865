"""Requests as the engine's parts pass them on: a validated prompt, its parameters, and the tokens that it allows."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int, Shaped

from jswa.types import SamplingParams


class Words(NamedTuple):
    """Some words of a mask: their indices, in order and each once, and their bits."""

    at: Int[np.ndarray, " n"]
    bits: Int[np.ndarray, " n"]


class Mask(NamedTuple):
    """Tokens that may be generated, as ⌈V/32⌉ words of bits, token t in bit t % 32 of word t // 32.

    Attributes:
        fill: the words that are not listed, -1 (every token) or 0 (none).
        at: the words that are listed, in order; None: all of them.
        bits: the listed words.
    """

    fill: int
    at: Int[np.ndarray, " n"] | None
    bits: Int[np.ndarray, " n"]

    def words(self, at: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """Return some of the words."""
        found = np.full(len(at), self.fill, np.int32)
        if self.at is None:
            found[:] = self.bits[at]
            return found
        if len(self.at):
            index = np.minimum(np.searchsorted(self.at, at), len(self.at) - 1)
            listed = self.at[index] == at
            found[listed] = self.bits[index[listed]]
        return found


class AllWords(NamedTuple):
    """All words of a mask, in order; the array is valid until masks are filled again."""

    bits: Int[np.ndarray, " words"]


BANS, BAN_TOKENS = 16, 8  # sequences of a row whose last token the device forbids by itself, and tokens of each
ANY_TOKEN = -1  # in such a sequence
NO_WORDS = Words(np.zeros(0, np.int32), np.zeros(0, np.int32))
EVERY_TOKEN = Mask(-1, *NO_WORDS)


class Constraint(NamedTuple):
    """Biases and masks of one request; its penalties are in its parameters. V tokens in the vocabulary.

    Attributes:
        bias_ids, bias: token ids, and the biases that are added to their logits.
        allowed: the tokens that may be generated.
        early: words of the mask that differ before the text has `min_length` tokens: they lack the stop tokens.
        stops: these stop tokens; none without `min_length`.
        bad_words: token sequences; the last token of each is forbidden if the text ends in the others.
    """

    bias_ids: Int[np.ndarray, " B"]
    bias: Float[np.ndarray, " B"]
    allowed: Mask
    early: Words
    stops: tuple[int, ...]
    min_length: int
    bad_words: tuple[tuple[int, ...], ...]

    @property
    def fits_device(self) -> bool:
        """Whether the device forbids bad words and early stop tokens by itself: there are few, and none is long."""
        few = len(self.stops) + len(self.bad_words) <= BANS
        return few and max(map(len, self.bad_words), default=0) <= BAN_TOKENS

    def bans(self) -> Int[np.ndarray, "n columns"]:
        """Return the sequences whose last token is forbidden behind the others, for the device.

        A line has the length of the text up to which that holds, then `BAN_TOKENS` tokens, `ANY_TOKEN` in front.
        """
        lines = np.full((len(self.stops) + len(self.bad_words), 1 + BAN_TOKENS), ANY_TOKEN, np.int32)
        lines[:, 0] = self.min_length
        lines[: len(self.stops), -1] = self.stops
        for line, word in zip(lines[len(self.stops) :], self.bad_words, strict=True):
            line[0], line[-len(word) :] = np.iinfo(np.int32).max, word
        return lines


class TextGrammar(Protocol):
    """A compiled grammar, `jswa.grammar.matching.llg.Grammar`; it is shared by requests."""

    def matcher(self) -> Any:
        """Return a `Matcher` at the beginning of a text."""
        ...


class ImageRows(NamedTuple):
    """An image of a prompt: what the model reads in place of the embedding of each of its soft tokens.

    Attributes:
        digest: of its pixels; its tokens have the ids `jswa.images.tokens.image_ids` of it.
        rows: read-only, in the model's type.
    """

    digest: bytes
    rows: Shaped[np.ndarray, "n M"]


class PlacedImage(NamedTuple):
    """An image at its place in a prompt: the position of its first soft token, and the rows of all."""

    start: int
    rows: Shaped[np.ndarray, "n M"]


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the engine besides its prompt and its sampling parameters.

    Attributes:
        priority: lower runs first.
        cache_salt: cached prefixes are shared with requests of the same salt only.
        lora: name of the LoRA adapter; cached prefixes are never shared between adapters.
        tenant, weight: name of the client that shares the engine with others, and its weight. Tenants that ask for more
            than the engine can run get shares in proportion to their weights (`FairQueue`).
    """

    priority: int = 0
    cache_salt: str = ""
    lora: str | None = None
    tenant: str = ""
    weight: float = 1.0


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, eq=False)
class Request:
    """A validated prompt with its sampling parameters.

    Attributes:
        stop_ids: tokens that end the text; they include the model's end tokens unless the request ignores these.
        key: the random key of the request, the two halves of its 64-bit seed.
        max_length: limit of prompt and generated tokens together.
        constraint: None if the logits are used unchanged.
        grammar: what the text is held to; then `constraint` is not None.
        cache_salt: key of the prefix tree (`root_key`), made from the options' salt and adapter.
        adapter: number of the LoRA adapter; 0: none.
        version: that of the engine's weights when the request was made.
        images: in the order of the prompt, whose soft tokens have negative ids.
    """

    request_id: str
    prompt: Int[np.ndarray, " P"]
    params: SamplingParams
    stop_ids: frozenset[int]
    key: tuple[int, int]
    max_length: int
    options: RequestOptions = DEFAULT_OPTIONS
    constraint: Constraint | None = None
    grammar: TextGrammar | None = None
    cache_salt: str = ""
    adapter: int = 0
    version: int = 0
    images: tuple[PlacedImage, ...] = ()


def bits_of(ids: Int[np.ndarray, " N"], vocab_size: int) -> Int[np.ndarray, " words"]:
    """Return tokens as ⌈V/32⌉ words of bits, token t in bit t % 32 of word t // 32."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, bool)
    chosen[ids] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)
