"""One int32 array per launch: a plan padded to its bucket, so that a step costs one upload. No jax.

    [ rows R × columns | tokens T | full-page entries U × 3 | local-page entries U × 3 | section T, if a rib needs one
      | adapters R, if the engine has any | rows in place of embeddings T × M, if the variant reads some ]

Floats are stored as their bits. Padding rows and entries name row `max_rows`, which does not exist: writes to it are
dropped on the device. `unpack` slices numpy and jax arrays alike.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.exec.buckets import Bucket
from jswa.plan import COLUMNS, FROM_DEVICE, StepPlan


class PackSpec(NamedTuple):
    """Sizes of the packed array of one bucket."""

    rows: int
    tokens: int
    entries: int
    max_rows: int
    section: int
    adapters: int = 0
    per_row: int = 0  # places for tokens of each row, the first ones; 0: they lie one behind the other
    width: int = 0  # numbers of the row that each token gets in place of its embedding; 0: none gets any

    @property
    def size(self) -> int:
        """Elements of the array."""
        own = self.rows * len(COLUMNS) + self.tokens + 6 * self.entries + self.section + self.adapters
        return own + self.tokens * self.width

    @staticmethod
    def of(
        bucket: Bucket,
        *,
        page_size: int,
        max_rows: int,
        section: bool = False,
        adapters: bool = False,
        width: int = 0,
    ) -> "PackSpec":
        """Derive the sizes. A row of n tokens takes at most ⌈n / p⌉ new pages of a kind."""
        return PackSpec(
            bucket.rows,
            bucket.tokens,
            -(-(bucket.rows * bucket.per_row if bucket.decode else bucket.tokens) // page_size) + bucket.rows,
            max_rows,
            bucket.tokens if section else 0,
            bucket.rows if adapters else 0,
            (1 if bucket.shared else bucket.per_row) if bucket.decode and bucket.drafts else 0,
            width,
        )


class Inputs(NamedTuple):
    """Views into the packed array, by section."""

    rows: Any  # [R, columns]
    tokens: Any  # [T]
    full_pages: Any  # [U, 3]
    local_pages: Any  # [U, 3]
    section: Any  # [T] or [0]: a number for each token, for the hooks of a rib
    adapters: Any  # [R], 0 for rows without an adapter; or None
    embedded: Any  # [T, M], bits of rows in place of embeddings; or None

    def column(self, name: str) -> Any:
        """Return one column of the rows, [R], int32 bits."""
        return column(self.rows, name)


def column(rows: Any, name: str) -> Any:
    """Return one column of packed records `[R, columns]`, [R], int32 bits."""
    return rows[:, COLUMNS.index(name)]


def padding(spec: PackSpec) -> Int[np.ndarray, " size"]:
    """Return the packed array of a step without rows, which changes nothing on the device."""
    return _padding(spec).copy()


@lru_cache(maxsize=256)
def _padding(spec: PackSpec) -> Int[np.ndarray, " size"]:
    packed = np.zeros(spec.size, np.int32)
    inputs = unpack(packed, spec)
    for column in ("row_id", "logits_state"):
        inputs.column(column)[:] = spec.max_rows
    for section in (inputs.full_pages, inputs.local_pages):
        section[:, 0] = spec.max_rows
    return packed


def pack(plan: StepPlan, spec: PackSpec) -> Int[np.ndarray, " size"]:
    """Pack a plan. The array is fresh each time: the device may still read the previous one."""
    packed = padding(spec)
    inputs = unpack(packed, spec)
    inputs.rows[: plan.num_rows] = plan.rows
    if spec.per_row:
        # All but the first token of a row are drafts, which the device has.
        places = inputs.tokens[: spec.rows * spec.per_row].reshape(spec.rows, spec.per_row)
        places[: plan.num_rows] = FROM_DEVICE
        places[: plan.num_rows, 0] = plan.tokens[np.cumsum(plan.counts) - plan.counts]
    else:
        inputs.tokens[: plan.num_tokens] = plan.tokens
    for section, entries in ((inputs.full_pages, plan.full_pages), (inputs.local_pages, plan.local_pages)):
        if len(entries):
            section[: len(entries)] = entries
    if spec.section:
        inputs.section[: plan.num_tokens] = plan.section
    if spec.adapters:
        inputs.adapters[: len(plan.adapters)] = plan.adapters
    if spec.width and plan.embedded is not None:
        _pack_embedded(inputs.embedded.view(np.float32), plan, spec)
    return packed


def _pack_embedded(out: Float[np.ndarray, "T M"], plan: StepPlan, spec: PackSpec) -> None:
    assert plan.embedded is not None
    if spec.per_row:
        places = out[: spec.rows * spec.per_row].reshape(spec.rows, spec.per_row, spec.width)
        places[: plan.num_rows, 0] = plan.embedded[np.cumsum(plan.counts) - plan.counts]
    else:
        out[: plan.num_tokens] = plan.embedded


def unpack(packed: Any, spec: PackSpec) -> Inputs:
    """Slice the packed array into its sections (views in numpy, slices under jit)."""
    a = spec.rows * len(COLUMNS)
    b = a + spec.tokens
    c = b + 3 * spec.entries
    d = c + 3 * spec.entries
    e = d + spec.section
    return Inputs(
        packed[:a].reshape(spec.rows, len(COLUMNS)),
        packed[a:b],
        packed[b:c].reshape(spec.entries, 3),
        packed[c:d].reshape(spec.entries, 3),
        packed[d:e],
        packed[e : e + spec.adapters] if spec.adapters else None,
        packed[e + spec.adapters :].reshape(spec.tokens, spec.width) if spec.width else None,
    )
