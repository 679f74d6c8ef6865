"""A plan as launches: numbers of compiled programs with their argument arrays; and what comes back from a step.

The first host runs its launches and broadcasts them to the other hosts, one message per step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jswa.exec.pack import PackSpec, pack
from jswa.exec.programs.drafts.lookup import text_batches
from jswa.exec.programs.logits_state import bit_lines, logits_state_batches, mask_batches
from jswa.exec.programs.pages import move_batches, row_batches
from jswa.exec.programs.sampling.rows import StepOutputs
from jswa.plan import LogitsEntry, RowMask, StepPlan, StepResults, Words
from jswa.speculation import Speculation

# MOVE_PAGES copies pages and renames them in the full table; STEP + n is the step program n.
(
    COPY_PAGES, MOVE_PAGES, SET_ROWS, SET_LOGITS_STATE, SET_BITS, SET_MASKS, SET_ADAPTER, SET_TEXTS, PREPARE, STEP,
) = range(10)  # fmt: skip
_TYPES = (np.dtype(np.int32), np.dtype(np.float32))


class ProgramLaunch(NamedTuple):
    """A program and its arguments. PREPARE runs no program: it asks the other hosts to compile one."""

    program: int
    arrays: tuple[Shaped[np.ndarray, "..."] | np.int32, ...]


def plan_launches(
    plan: StepPlan,
    steps: Mapping[int, PackSpec],
    num_pages: int,
    pages_per_row: int,
    vocab: int,
    speculation: Speculation | None = None,
) -> list[ProgramLaunch]:
    """Return a plan's launches: moves, table rows (32 a launch), logits state and texts, then the programs of its step.

    `steps`: by number, a program of whole steps; or one of first halves, behind the one of its drafts if it has any.
    """
    (max_rows,) = {spec.max_rows for spec in steps.values()}
    out = list(move_launches(plan.moves, num_pages)) if len(plan.moves) else []
    out += [ProgramLaunch(SET_ROWS, (batch,)) for batch in row_batches(plan.table_rows, pages_per_row, max_rows)]
    if plan.logits_state or plan.masks:
        out += logits_launches(plan.logits_state, plan.masks, max_rows, vocab)
    if speculation is not None and plan.texts:
        batches = text_batches(plan.texts, speculation.history, speculation.reference, max_rows)
        out += [ProgramLaunch(SET_TEXTS, (batch,)) for batch in batches]
    return [*out, *(ProgramLaunch(STEP + number, (pack(plan, spec),)) for number, spec in steps.items())]


def move_launches(moves: Int[np.ndarray, "M 3"], num_pages: int) -> Iterator[ProgramLaunch]:
    """Yield the launches that move pages."""
    for batch in move_batches(moves, num_pages):
        yield ProgramLaunch(MOVE_PAGES if (batch[0] != batch[2]).any() else COPY_PAGES, (batch,))


def logits_launches(
    entries: Sequence[LogitsEntry], masks: Sequence[RowMask], max_rows: int, vocab: int
) -> Iterator[ProgramLaunch]:
    """Yield the launches that set rows of the logits state: mostly one for all rows that begin in a step."""
    for line in bit_lines(entries, vocab):
        yield ProgramLaunch(SET_BITS, (line,))
    if entries or any(isinstance(mask.words, Words) for mask in masks):
        for batch in logits_state_batches(entries, masks, max_rows):
            yield ProgramLaunch(SET_LOGITS_STATE, (batch,))
    for masks_of_rows in mask_batches(masks, max_rows):
        yield ProgramLaunch(SET_MASKS, (masks_of_rows,))


def encode(launches: Iterable[ProgramLaunch]) -> bytes:
    """Encode launches as int32 words: program and number of arrays, then type, shape and contents of each array."""
    words: list[Int[np.ndarray, " n"]] = []
    for program, arrays in launches:
        words.append(np.array((program, len(arrays)), np.int32))
        for array in map(np.asarray, arrays):
            words.append(np.array((_TYPES.index(array.dtype), array.ndim, *array.shape), np.int32))
            words.append(np.ascontiguousarray(array).reshape(-1).view(np.int32))
    return np.concatenate(words).tobytes()


def decode(message: bytes) -> list[ProgramLaunch]:
    """Decode the launches of a message. The arrays are views of the message."""
    words, out, at = np.frombuffer(message, np.int32), [], 0
    while at < len(words):
        program, count = words[at : at + 2].tolist()
        at, arrays = at + 2, []
        for _ in range(count):
            kind, axes = words[at : at + 2].tolist()
            shape = words[at + 2 : at + 2 + axes].tolist()
            at += 2 + axes
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(words[at : at + size].view(_TYPES[kind]).reshape(shape))
            at += size
        out.append(ProgramLaunch(program, tuple(arrays)))
    return out


class Pending:
    """A step that is on the device.

    Args:
        outputs: None if only the first half has been launched; `finish` launches the other half with these masks.
        drafts: those of a step in two halves, if it can have any.
    """

    def __init__(
        self,
        plan: StepPlan,
        outputs: StepOutputs | None,
        finish: Callable[[tuple[RowMask, ...]], StepOutputs],
        drafts: jax.Array | None = None,
    ) -> None:
        self.plan = plan
        self._drafts = drafts
        self._outputs = outputs
        self._finish = finish

    def drafts(self) -> Int[np.ndarray, "R K"]:
        """Return the drafts of the plan's rows in a step with late masks, negative behind the last; wait for these."""
        if self._drafts is None:
            return np.zeros((self.plan.num_rows, 0), np.int32)
        return np.asarray(self._drafts)[: self.plan.num_rows]

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Launch the second half, after the first: set the masks that the plan has left out, and sample."""
        assert self._outputs is None, "the step has been launched as a whole"
        self._outputs = self._finish(masks)

    def tokens(self) -> Int[np.ndarray, " R"] | Int[np.ndarray, "R n"]:
        """Return the tokens of the plan's rows, as `StepOutputs` has them; wait for the step."""
        assert self._outputs is not None, "only half of the step has been launched"
        return np.asarray(self._outputs.tokens)[: self.plan.num_rows]

    def results(self) -> StepResults | None:
        """Return what the step gives besides tokens, None if ribs ask for nothing of it; wait for the step."""
        assert self._outputs is not None, "only half of the step has been launched"
        _, drawn, forwarded, *experts = self._outputs
        if not drawn and not forwarded:
            return None
        return StepResults(*jax.tree.map(np.asarray, (drawn, forwarded, *experts)))
