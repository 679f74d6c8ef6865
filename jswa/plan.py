"""The values that pass between the engine's parts: requests in, step plans down, tokens up. Ints and numpy only."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int, Shaped

from jswa.errors import GenerationError
from jswa.types import DraftCounts, FinishReason, PrefixHit, SamplingParams

# In StepPlan.tokens: the token that the device sampled last for this row, or a draft of the next ones. In
# StepPlan.starts: the length of the row that the device has.
FROM_DEVICE = -1
# In the tokens of a step, of rows that sample a token and of those that do not:
NOT_FINITE = -1  # KV or logits of the row's tokens held NaN or infinity
NOTHING_ALLOWED = -2  # the row's constraint forbids every token
PAST_LIMIT = -4  # the row ran nothing: drafts that were right had taken it to its limit before the step


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


NO_WORDS = Words(np.zeros(0, np.int32), np.zeros(0, np.int32))
EVERY_TOKEN = Mask(-1, *NO_WORDS)


class Constraint(NamedTuple):
    """Biases and masks of one request; its penalties are in its parameters. V tokens in the vocabulary.

    Attributes:
        bias_ids, bias: token ids, and the biases that are added to their logits.
        allowed: the tokens that may be generated.
        early: words of the mask that differ before the text has `min_length` tokens: they lack the stop tokens.
        bad_words: token sequences; the last token of each is forbidden if the text ends in the others.
    """

    bias_ids: Int[np.ndarray, " B"]
    bias: Float[np.ndarray, " B"]
    allowed: Mask
    early: Words
    min_length: int
    bad_words: tuple[tuple[int, ...], ...]

    @property
    def has_one_mask(self) -> bool:
        """Whether the same tokens are allowed everywhere in the text."""
        return not self.bad_words and not len(self.early.at)


class TextGrammar(Protocol):
    """A compiled grammar, `jswa.grammar.llg.Grammar`; it is shared by requests."""

    def matcher(self) -> Any:
        """Return a `Matcher` at the beginning of a text."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """A validated prompt with its sampling parameters.

    Attributes:
        stop_ids: tokens that end the text; they include the model's end tokens unless the request ignores these.
        key: the random key of the request, the two halves of its 64-bit seed.
        max_length: limit of prompt and generated tokens together.
        priority: lower runs first.
        constraint: None if the logits are used unchanged.
        grammar: what the text is held to; then `constraint` is not None.
        cache_salt: key of the prefix tree (`root_key`), made from the request's salt and its adapter.
        adapter: number of the LoRA adapter; 0: none.
        tenant, weight: name of the client that shares the engine with others, and its share in proportion to the
            other tenants' weights (`Turns`).
        version: that of the engine's weights when the request was made.
    """

    request_id: str
    prompt: Int[np.ndarray, " P"]
    params: SamplingParams
    stop_ids: frozenset[int]
    key: tuple[int, int]
    max_length: int
    priority: int = 0
    constraint: Constraint | None = None
    grammar: TextGrammar | None = None
    cache_salt: str = ""
    adapter: int = 0
    tenant: str = ""
    weight: float = 1.0
    version: int = 0


class ChoiceLogprobs(NamedTuple):
    """Log probabilities at one position: the token there with its rank, and the most likely tokens.

    Tuples of numbers, which the garbage collector does not look at again: thousands of these wait for a slow client.
    `drawn` and `experts` as in `LogprobTable`, the latter as the bytes of int16.
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    drawn: float | None = None
    experts: bytes | None = None


class PromptLogprobs:
    """Log probabilities of the prompt's tokens, from the second on, as arrays; iteration makes entries one by one.

    To free millions of entries, or to search them for reference cycles, would hold the GIL for 0.1 s and more.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Int[np.ndarray, " n"], LogprobTable]] = []
        self._length = 0

    def add(self, tokens: Int[np.ndarray, " n"], table: "LogprobTable") -> None:
        """Append positions; `table` has a row for each token."""
        self._parts.append((tokens, table))
        self._length += len(tokens)

    @property
    def parts(self) -> Sequence[tuple[Int[np.ndarray, " n"], "LogprobTable"]]:
        """What was added, in its order."""
        return self._parts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ChoiceLogprobs]:
        for tokens, table in self._parts:
            for row, token in enumerate(tokens.tolist()):
                yield table.row(row, token)


class TokenEvent(NamedTuple):
    """One token of one request, or its end. `token` is None if the request ended without one.

    The event of the first token also has `prompt_logprobs` (an entry for each prompt token but the first),
    `first_scheduled_time` (when its first step was planned, in seconds of `time.monotonic`) and its prefix cache hit.
    `error` says why there is no token if `finish_reason` is "error". `drafts` counts those so far: it comes with the
    end, and with each token of a step with drafts if a stop string may end the text.
    An event with a `version` has nothing else: the request's next tokens come from weights of that version.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: Collection[ChoiceLogprobs] | PromptLogprobs | None = None
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None
    error: GenerationError | None = None
    version: int | None = None
    drafts: DraftCounts | None = None

    @property
    def is_stop_token(self) -> bool:
        """Whether the token ends the text and is no part of it."""
        return self.token is not None and self.finish_reason == "stop"


@dataclass(frozen=True, eq=False)
class StepEvents:
    """The results of one step. A token of a request that goes on is an entry of two arrays; all else is a `TokenEvent`.

    Tokens that a grammar forces, and the end of its text, may follow in `others`. Iteration yields all in their order.

    Attributes:
        request_ids, tokens: the requests that got a token and nothing else, and that token.
        others: first and last tokens of requests, tokens with log probabilities, and ends without a token.
    """

    request_ids: Shaped[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, object))
    tokens: Int[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, np.int32))
    others: tuple[TokenEvent, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens) + len(self.others)

    def __iter__(self) -> Iterator[TokenEvent]:
        for request_id, token in zip(self.request_ids.tolist(), self.tokens.tolist(), strict=True):
            yield TokenEvent(request_id, token)
        yield from self.others


class LogprobTable(NamedTuple):
    """Log probabilities of N choices, as `exec.programs.sampling.LogprobRows` has them on the device.

    `drawn`: of the chosen token in the distribution that it was drawn from; None for tokens of prompts.
    `experts`: those of the token before, in each layer with experts; None if the engine does not return them.
    """

    chosen: Float[np.ndarray, " N"]
    rank: Int[np.ndarray, " N"]
    ids: Int[np.ndarray, "N top"]
    values: Float[np.ndarray, "N top"]
    drawn: Float[np.ndarray, " N"] | None = None
    experts: Int[np.ndarray, "N L k"] | None = None

    def rows(self, first: int, end: int) -> "LogprobTable":
        """Return a copy of some rows."""
        return LogprobTable(*(None if array is None else array[first:end].copy() for array in self))  # type: ignore[arg-type]

    def row(self, index: int, token: int) -> ChoiceLogprobs:
        """Return the entry of one choice; `token` is the token that was chosen."""
        ids, values = tuple(self.ids[index].tolist()), tuple(self.values[index].tolist())
        drawn = None if self.drawn is None else float(self.drawn[index])
        experts = None if self.experts is None else self.experts[index].tobytes()
        return ChoiceLogprobs(token, float(self.chosen[index]), int(self.rank[index]), ids, values, drawn, experts)


class StepLogprobs(NamedTuple):
    """Log probabilities of one step: of each row's sampled token, and of the prompt token after each token."""

    sampled: LogprobTable
    prompt: LogprobTable | None


class ExtrasEntry(NamedTuple):
    """The extras of a row that begins.

    Attributes:
        bias_ids, bias: token ids, and the biases that are added to their logits.
        allowed: the tokens that may be generated until a `RowMask` changes the mask.
        prompt: its tokens count as seen; empty if no penalty asks for them.
        generated: tokens of its text that the row does not run because their KV is cached; empty as well.
    """

    row_id: int
    bias_ids: Int[np.ndarray, " B"]
    bias: Float[np.ndarray, " B"]
    allowed: Mask
    prompt: Int[np.ndarray, " P"]
    generated: Int[np.ndarray, " G"]


class RowMask(NamedTuple):
    """Words of a row's mask that change before this step."""

    row_id: int
    words: Words | AllWords


def bits_of(ids: Int[np.ndarray, " N"], vocab_size: int) -> Int[np.ndarray, " words"]:
    """Return tokens as ⌈V/32⌉ words of bits, token t in bit t % 32 of word t // 32."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, bool)
    chosen[ids] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


class RowText(NamedTuple):
    """Texts of a row in which its drafts are looked up: the part of its own that it does not run, and earlier ones.

    None: those that the device has stay. -1 is between two earlier texts; `offset`: place there less position here.
    """

    row_id: int
    text: Int[np.ndarray, " n"] | None
    reference: Int[np.ndarray, " m"] | None = None
    offset: int = 0


class TableRow(NamedTuple):
    """All pages of a row that starts on cached pages: full ids from page position 0, local ids from `first_local`."""

    row_id: int
    full: Int[np.ndarray, " F"]
    first_local: int
    local: Int[np.ndarray, " L"]


class Write(NamedTuple):
    """Rows of arrays to copy to slots of host memory. The arrays are by lane, and in each lane by device."""

    slots: Int[np.ndarray, " n"]
    lanes: list[Shaped[np.ndarray, "rows elems"]]
    rows: Int[np.ndarray, " n"]


class Save(NamedTuple):
    """Slots of host memory to copy. `keep` takes the copies, by lane and in each lane by device."""

    slots: Int[np.ndarray, " n"]
    keep: Callable[[list[Shaped[np.ndarray, "n elems"]]], None]


class Transfers(NamedTuple):
    """Slots to copy between the device and the second prefix cache in host memory, by pairs (source, destination).

    Attributes:
        moves: within host memory, before all others.
        downloads: to host memory, before the device changes anything: as the last step has left them.
        uploads: to the device, after the step.
        writes: to host memory from the disk, after the moves.
        saves: from host memory to the disk, after the writes.
    """

    moves: Int[np.ndarray, "M 2"]
    downloads: Int[np.ndarray, "D 2"]
    uploads: Int[np.ndarray, "U 2"]
    writes: tuple[Write, ...] = ()
    saves: tuple[Save, ...] = ()


SAMPLING_ROW = np.dtype([
    ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("repetition", "f4"), ("presence", "f4"),
    ("frequency", "f4"), ("key_high", "u4"), ("key_low", "u4"), ("extras", "i4"), ("prompt_length", "i4"),
])  # fmt: skip
SAMPLING = SAMPLING_ROW.names or ()  # as int32 columns, floats and keys by their bits
# What a step sends of each row, as int32 columns too.
COLUMNS = ("row_id", "start", "count", "full_write_from", "local_visible_from", "samples", "limit", *SAMPLING)
Logprobs = Literal["none", "sampled", "prompt"]
# What a plan may need of the step programs: log probabilities, or two halves between which masks are filled.
Feature = Literal["none", "sampled", "prompt", "split"]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: the rows that run, and their positions. The device side gets nothing else.

    R rows, T tokens. A row runs positions [start, start + count); its tokens follow those of the row before.

    A row that speculates runs the token that it sampled last and drafts of the next ones. Of a row whose start is
    FROM_DEVICE, the positions from limit - 1 on do not run.

    Attributes:
        rows: a record for each row, columns `COLUMNS`; the properties below are views of the first six.
        tokens: ids to run; FROM_DEVICE for a row whose token the previous step sampled.
        extras, masks: rows of the extras tables to set before the step, `extras` first.
        late: ids of the rows whose masks depend on tokens that the host does not know yet. If there are any, the step
            runs in two halves, and the host sets these masks between them.
        full_pages, local_pages: new page-table entries (row id, page position, page id).
        moves: slots to copy before the step, in order (source, destination, whether to rename the source in the full
            table): pages that compaction moves, and copies of cached pages that a row will write to.
        table_rows: whole page-table rows to set after the moves.
        logprobs: "sampled" if any row wants log probabilities of its sampled token, "prompt" if any also wants those
            of its prompt; then `targets` has the token that follows each token of the step (0 if none does).
        adapters: index of each row's LoRA adapter, 0 for none. It may be empty if no row has one.
        drafts: drafts per row in the step program; 0: no row has any.
        texts: of rows whose drafts are looked up: those that begin, or get other texts to look in.
        transfers: pages that go to host memory, and come back; None: none do.
    """

    rows: Int[np.ndarray, "R C"]
    tokens: Int[np.ndarray, " T"]
    full_pages: Int[np.ndarray, "F 3"]
    local_pages: Int[np.ndarray, "L 3"]
    moves: Int[np.ndarray, "M 3"]
    table_rows: tuple[TableRow, ...] = ()
    extras: tuple[ExtrasEntry, ...] = ()
    masks: tuple[RowMask, ...] = ()
    late: tuple[int, ...] = ()
    logprobs: Logprobs = "none"
    targets: Int[np.ndarray, " T0"] = field(default_factory=lambda: np.zeros(0, np.int32))
    adapters: Int[np.ndarray, " R0"] = field(default_factory=lambda: np.zeros(0, np.int32))
    drafts: int = 0
    texts: tuple[RowText, ...] = ()
    transfers: Transfers | None = None

    @property
    def row_ids(self) -> Int[np.ndarray, " R"]:
        """Index of each row in the device state (page tables, last token), fixed while the row runs."""
        return self.rows[:, 0]

    @property
    def starts(self) -> Int[np.ndarray, " R"]:
        """The first position that each row runs, or FROM_DEVICE."""
        return self.rows[:, 1]

    @property
    def counts(self) -> Int[np.ndarray, " R"]:
        """The number of positions that each row runs."""
        return self.rows[:, 2]

    @property
    def full_write_from(self) -> Int[np.ndarray, " R"]:
        """The first position whose full KV the row writes; earlier full KV comes from the cache."""
        return self.rows[:, 3]

    @property
    def local_visible_from(self) -> Int[np.ndarray, " R"]:
        """The first position that the row's local layers may read."""
        return self.rows[:, 4]

    @property
    def samples(self) -> Int[np.ndarray, " R"]:
        """How many of the row's last positions yield a token: none inside a prompt, one more than there are drafts."""
        return self.rows[:, 5]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.tokens)
