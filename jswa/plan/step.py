"""The plan of a step: the rows that run, their positions and pages, and all else that the device must be told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from jswa.plan.request import BAN_TOKENS, AllWords, Mask, Request, Words

# In StepPlan.tokens: the token that the device sampled last for this row, or a draft of the next ones; ids below it are
# tokens of images. In StepPlan.starts: the length of the row that the device has.
FROM_DEVICE = -1
_NO_BANS, _NO_TOKENS = np.zeros((0, 1 + BAN_TOKENS), np.int32), np.zeros(0, np.int32)


class LogitsEntry(NamedTuple):
    """The logits state of a row that begins.

    Attributes:
        bias_ids, bias: token ids, and the biases that are added to their logits.
        allowed: the tokens that may be generated until a `RowMask` changes the mask.
        prompt: its tokens count as seen; empty if no penalty asks for them.
        generated: tokens of its text that the row does not run because their KV is cached; empty as well.
        bans: sequences whose last token the device forbids (`Constraint.bans`).
        recent: the last `BAN_TOKENS` tokens of its text that the row does not run, if there are bans.
        start: the position behind these.
    """

    row_id: int
    bias_ids: Int[np.ndarray, " B"]
    bias: Float[np.ndarray, " B"]
    allowed: Mask
    prompt: Int[np.ndarray, " P"]
    generated: Int[np.ndarray, " G"]
    bans: Int[np.ndarray, "n columns"] = _NO_BANS
    recent: Int[np.ndarray, " m"] = _NO_TOKENS
    start: int = 0


class RowMask(NamedTuple):
    """Words of a row's mask that change before this step.

    Attributes:
        place: the number of drafts behind which the mask holds: 0 for the token behind the row's last one. Behind
            drafts, only rows that are held to a grammar have masks of their own, which are sent whole.
    """

    row_id: int
    words: Words | AllWords
    place: int = 0


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


# The record of a row's sampling parameters, as it goes to the device: a field for each.
SAMPLING_ROW = np.dtype([
    ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("repetition", "f4"), ("presence", "f4"),
    ("frequency", "f4"), ("key_high", "u4"), ("key_low", "u4"), ("logits_state", "i4"), ("prompt_length", "i4"),
    ("by_place", "i4"), ("top_n_sigma", "f4"),
])  # fmt: skip
SAMPLING = SAMPLING_ROW.names or ()  # as int32 columns, floats and keys by their bits
SAMPLING_REALS = tuple(name for name in SAMPLING if SAMPLING_ROW[name] == np.float32)
# What a step sends of each row, as int32 columns too.
COLUMNS = ("row_id", "start", "count", "full_write_from", "local_visible_from", "samples", "limit", *SAMPLING)
PLAIN = "none"  # the variant of step programs that compute tokens and nothing else
SPLIT = "split"  # the feature of steps in two halves, between which masks are filled
Feature = str  # what a plan may need of the step programs: a variant (`ribs.rib.Variant`), or SPLIT


def sampling_of(request: Request) -> Shaped[np.ndarray, ""]:
    """Return the record of a request's parameters. A limit that is off is 0, whatever other number says so too."""
    params, (high, low) = request.params, request.key
    values = {
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "top_n_sigma": max(params.top_n_sigma, 0.0),
        "key_high": high,
        "key_low": low,
        "prompt_length": len(request.prompt),
        "by_place": request.grammar is not None,
    }
    return np.array(tuple(values.get(name, 0) for name in SAMPLING), SAMPLING_ROW)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: the rows that run, and their positions. The device side gets nothing else.

    R rows, T tokens. A row runs positions [start, start + count); its tokens follow those of the row before.

    A row that speculates runs the token that it sampled last and drafts of the next ones. Of a row whose start is
    FROM_DEVICE, the positions from limit - 1 on do not run.

    Attributes:
        rows: a record for each row, columns `COLUMNS`; the properties below are views of the first six.
        tokens: ids to run; FROM_DEVICE for a row whose token the previous step sampled.
        logits_state, masks: rows of the logits state to set before the step, `logits_state` first.
        late: ids of the rows whose masks depend on tokens that the host does not know yet. If there are any, the step
            runs in two halves, and the host sets these masks between them. If the step has drafts, the device returns
            them before the first half.
        full_pages, local_pages: new page-table entries (row id, page position, page id).
        moves: slots to copy before the step, in order (source, destination, whether to rename the source in the full
            table): pages that compaction moves, and copies of cached pages that a row will write to.
        table_rows: whole page-table rows to set after the moves.
        variant: of the step programs, as the requests of the rows need it.
        section: a number for each token of the step, if the variant has some (`ribs.rib.RibRows.section`).
        embedded: rows in place of the embeddings of the tokens whose ids are negative, if the variant reads some.
        adapters: index of each row's LoRA adapter, 0 for none. It may be empty if no row has one.
        drafts: drafts per row in the step program; 0: no row has any. In a decode step whose drafts are looked up a row
            may have more, if others have fewer.
        texts: of rows whose drafts are looked up: those that begin, or get other texts to look in.
        transfers: pages that go to host memory, and come back; None: none do.
    """

    rows: Int[np.ndarray, "R C"]
    tokens: Int[np.ndarray, " T"]
    full_pages: Int[np.ndarray, "F 3"]
    local_pages: Int[np.ndarray, "L 3"]
    moves: Int[np.ndarray, "M 3"]
    table_rows: tuple[TableRow, ...] = ()
    logits_state: tuple[LogitsEntry, ...] = ()
    masks: tuple[RowMask, ...] = ()
    late: tuple[int, ...] = ()
    variant: str = PLAIN
    section: Int[np.ndarray, " T0"] = field(default_factory=lambda: np.zeros(0, np.int32))
    embedded: Float[np.ndarray, "T M"] | None = None
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

    @cached_property
    def ends(self) -> Int[np.ndarray, " R"]:
        """The end of each row's tokens among those of the step."""
        return np.cumsum(self.counts)

    @cached_property
    def runs_prompts(self) -> bool:
        """Whether the step runs several known tokens of a row: a prompt, or what comes back behind a preemption."""
        return bool((self.counts > np.maximum(self.samples, 1)).any())

    @cached_property
    def num_places(self) -> int:
        """Tokens that the step program must have room for: `drafts` per row, though some rows may run more."""
        drafts = np.maximum(self.samples - 1, 0) if self.drafts else np.zeros(0, np.int32)
        return self.num_tokens - max(0, int(drafts.sum()) - self.drafts * int(np.count_nonzero(drafts)))
