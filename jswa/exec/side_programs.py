"""Compiles the programs beside the step: they copy pages, and set rows of page tables and the logits state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.exec.compile.store import ProgramStore, compiled, named
from jswa.exec.launches import (
    COPY_PAGES,
    MOVE_PAGES,
    SET_BITS,
    SET_LOGITS_STATE,
    SET_MASKS,
    SET_ROWS,
    SET_TEXTS,
    ProgramLaunch,
)
from jswa.exec.mesh import mesh_of, on_mesh, specs_of
from jswa.exec.programs.drafts.lookup import ROWS as TEXT_ROWS
from jswa.exec.programs.drafts.lookup import Texts, set_texts, text_batches
from jswa.exec.programs.logits_state import (
    MASKS,
    LogitsState,
    logits_state_batches,
    set_bits,
    set_logits_state,
    set_masks,
)
from jswa.exec.programs.pages import ROWS, WIDTH, copy_pages, rename_pages, set_rows
from jswa.exec.programs.state import DeviceState
from jswa.plan import RowText


class SidePrograms(NamedTuple):
    """The programs beside the step. The parts of the state that they change are donated.

    Attributes:
        set_rows, set_masks, set_texts: by the number of rows of a batch.
        set_logits: by the number of the launch.
    """

    copy_pages: jax.stages.Compiled
    rename_pages: jax.stages.Compiled
    set_rows: Mapping[int, jax.stages.Compiled]
    set_logits: Mapping[int, jax.stages.Compiled]
    set_masks: Mapping[int, jax.stages.Compiled]
    set_texts: Mapping[int, jax.stages.Compiled]

    def run(self, program: int, state: DeviceState, placed: Sequence[Any]) -> DeviceState:
        """Return the next state: one of these programs has changed a part of it. `placed`: its other arguments."""
        if program in (COPY_PAGES, MOVE_PAGES):
            lanes = self.copy_pages([*state["lanes"], *state["draft_lanes"]], *placed)
            own = len(state["lanes"])
            state = {**state, "lanes": lanes[:own], "draft_lanes": lanes[own:]}
            if program == COPY_PAGES:
                return state
            return {**state, "full_table": self.rename_pages(state["full_table"], *placed)}
        if program == SET_ROWS:
            tables = state["full_table"], state["local_table"], state["length"]
            full, local, length = self.set_rows[len(placed[0])](tables, *placed)
            return {**state, "full_table": full, "local_table": local, "length": length}
        if program == SET_TEXTS:
            return {**state, "texts": self.set_texts[len(placed[0])](state["texts"], *placed)}
        change = self.set_masks[len(placed[0])] if program == SET_MASKS else self.set_logits[program]
        return {**state, "for_logits": change(state["for_logits"], *placed)}


def compile_side_programs(layout: KVLayout, state: DeviceState, store: ProgramStore | None) -> SidePrograms:
    """Compile the programs beside the step, from arrays or shapes, or load them."""
    logits_state, texts = state["for_logits"], state["texts"]
    return SidePrograms(
        compile_copy_pages(layout, state, store),
        compile_rename_pages(layout, state, store),
        compile_set_rows(state, store),
        compile_logits_state(logits_state, store),
        compile_set_masks(logits_state, store),
        {} if texts is None else compile_set_texts(texts, store),
    )


def compile_copy_pages(layout: KVLayout, state: DeviceState, store: ProgramStore | None = None) -> jax.stages.Compiled:
    """Compile `copy_pages` ahead of time. The lanes are donated."""
    lanes = [*state["lanes"], *state["draft_lanes"]]
    return _compile(store, partial(copy_pages, layout=layout), lanes, np.zeros((3, WIDTH), np.int32))


def compile_rename_pages(
    layout: KVLayout, state: DeviceState, store: ProgramStore | None = None
) -> jax.stages.Compiled:
    """Compile `rename_pages` ahead of time. The table is donated."""
    pages = state["lanes"][0].shape[1] * layout.pages_per_slab
    return _compile(store, partial(rename_pages, num_pages=pages), state["full_table"], np.zeros((3, WIDTH), np.int32))


def compile_set_rows(state: DeviceState, store: ProgramStore | None = None) -> dict[int, jax.stages.Compiled]:
    """Compile `set_rows` ahead of time, for each number of rows that a batch may have. The tables are donated."""
    tables = state["full_table"], state["local_table"], state["length"]
    max_rows, width = tables[0].shape
    return {
        size: _compile(store, set_rows, tables, np.zeros((size, 1 + 2 * width), np.int32))
        for size in _row_counts(max_rows)
    }


def _row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows that a batch of `row_batches` may have."""
    return [1 << n for n in range((min(ROWS, max_rows) - 1).bit_length() + 1)]


def compile_logits_state(
    logits_state: LogitsState, store: ProgramStore | None = None
) -> dict[int, jax.stages.Compiled]:
    """Compile the programs that set rows of the logits state, by their number. The tables are donated."""
    (batch,) = logits_state_batches((), (), len(logits_state["seen"]))
    line = np.zeros(2 + logits_state["mask"].shape[1], np.int32)
    return {
        SET_LOGITS_STATE: _compile(store, set_logits_state, logits_state, batch),
        SET_BITS: _compile(store, set_bits, logits_state, line),
    }


def compile_set_masks(logits_state: LogitsState, store: ProgramStore | None = None) -> dict[int, jax.stages.Compiled]:
    """Compile `set_masks` ahead of time, for each number of masks that a batch may have. The tables are donated."""
    width = 2 + logits_state["mask"].shape[1]
    return {size: _compile(store, set_masks, logits_state, np.zeros((size, width), np.int32)) for size in MASKS}


def compile_set_texts(texts: Texts, store: ProgramStore | None = None) -> dict[int, jax.stages.Compiled]:
    """Compile `set_texts` ahead of time, for each number of rows that a batch may have. The tables are donated."""
    return {len(batch): _compile(store, set_texts, texts, batch) for batch in _idle_texts(texts)}


def _idle_texts(texts: Texts) -> Iterator[Int[np.ndarray, "n size"]]:
    """Yield a batch of each size that sets nothing."""
    (max_rows, history), earlier = texts["history"].shape, texts["reference"]
    reference = 0 if earlier is None else earlier.shape[1]
    for n in range((min(TEXT_ROWS, max_rows) - 1).bit_length() + 1):
        nothing = [RowText(max_rows, None)] * (1 << n)
        yield from text_batches(nothing, history, reference, max_rows)


def _compile(
    store: ProgramStore | None, function: Callable[..., Any], state: Any, *arguments: Any
) -> jax.stages.Compiled:
    """Compile a program from a state (or a part of it) and replicated arrays to the next state, which is donated."""
    mesh = mesh_of(jax.tree.leaves(state)[0])
    run = on_mesh(function, mesh, (state, *arguments), specs_of(state))
    return compiled(store, named(function), jax.jit(run, donate_argnums=0), (state, *arguments))


def idle_launches(layout: KVLayout, state: DeviceState) -> Iterator[ProgramLaunch]:
    """Yield a launch of each program that changes nothing: every entry names a page or a row that does not exist."""
    pages = state["lanes"][0].shape[1] * layout.pages_per_slab
    max_rows, width = state["full_table"].shape
    moves = np.tile(pages + np.arange(WIDTH, dtype=np.int32), (3, 1))
    yield ProgramLaunch(COPY_PAGES, (moves,))
    yield ProgramLaunch(MOVE_PAGES, (moves,))
    for size in _row_counts(max_rows):
        rows = np.zeros((size, 1 + 2 * width), np.int32)
        rows[:, 0] = max_rows + np.arange(size)
        yield ProgramLaunch(SET_ROWS, (rows,))
    (batch,) = logits_state_batches((), (), max_rows)
    yield ProgramLaunch(SET_LOGITS_STATE, (batch,))
    words = state["for_logits"]["mask"].shape[1]
    line = np.zeros(2 + words, np.int32)
    line[0] = max_rows
    yield ProgramLaunch(SET_BITS, (line,))
    for size in MASKS:
        masks = np.zeros((size, 2 + words), np.int32)
        masks[:, 0] = max_rows
        yield ProgramLaunch(SET_MASKS, (masks,))
    if state["texts"] is not None:
        for batch in _idle_texts(state["texts"]):
            yield ProgramLaunch(SET_TEXTS, (batch,))
