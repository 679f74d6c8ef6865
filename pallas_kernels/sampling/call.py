"""The calls of the Triton kernels of sampling, through jax-triton, an optional package.

The kernels do not depend on the number of rows, so that a process compiles them once for all its programs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.sampling.arguments import OPTIONS, Codes, Drawn, Logprobs, SamplingRows, Tables, Tuning

_MOST_SPLITS = 32
_BLOCKS = ("tops", "masses", "firsts", "finite", "moments", "changed", "raw_tops", "raw_masses")
_ROWS = ("drawn", "reaches", "kept", "chosen_logs", "ranks", "top_ids", "top_logs", "drawn_logs")
_Shapes = dict[str, jax.ShapeDtypeStruct]


class _Arrays(NamedTuple):
    """Shapes of what the kernels write, by argument in the kernels' order; those that there are not are missing."""

    blocks: _Shapes
    parts: _Shapes
    rows: _Shapes


def sample(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    tables: Tables | None,
    codes: Codes,
    top: int | None,
    tuning: Tuning,
) -> Drawn:
    """See `api.sample`. Raises ImportError if jax-triton is missing."""
    triton.load()
    from pallas_kernels.sampling.kernel_draw import draw  # imports Triton
    from pallas_kernels.sampling.kernel_survey import survey

    (count, vocab), records = logits.shape, packed(rows)
    subs = -(-vocab // tuning.sub)
    chunks, splits = -(-subs // tuning.chunk), max(1, min(_MOST_SPLITS, tuning.drawers // count))
    arrays = _arrays(count, vocab, subs, chunks, splits, tuning, top, changed=tables is not None)
    sizes = {"VOCAB": vocab, "SUBS": subs, "CHUNKS": chunks, "SUB": tuning.sub, "RECORD": records.shape[1]}
    given = {"rows": records, "logits": logits}
    found = triton.call(
        survey,
        {**given, **_operands(tables), **_missing(_BLOCKS, arrays.blocks)},
        list(arrays.blocks.values()),
        (count, max(1, min(chunks, tuning.readers // count))),
        {**sizes, **_sizes_of(rows, tables), "TILE": tuning.chunk},
        warps=8,
    )
    result = triton.call(
        draw,
        {
            **given,
            "rows": jax.new_ref(records),  # whose arrivals are counted in it
            **_missing(_BLOCKS, arrays.blocks),
            **dict(zip(arrays.blocks, found, strict=True)),
            **_missing(_ROWS, arrays.rows),
        },
        [*arrays.parts.values(), *arrays.rows.values()],
        (count, splits),
        {**sizes, **_sizes_of_draw(subs, chunks, codes, top, tuning)},
        warps=16,
    )
    of_rows = dict(zip(arrays.rows, result[len(arrays.parts) :], strict=True))
    tokens, reach, mass = (of_rows[name] for name in _ROWS[:3])
    if top is None:
        return Drawn(tokens, reach, mass, None)
    return Drawn(tokens, reach, mass, Logprobs(*(of_rows[name] for name in _ROWS[3:])))


def _sizes_of_draw(subs: int, chunks: int, codes: Codes, top: int | None, tuning: Tuning) -> dict[str, int]:
    """Return the further static sizes of the second kernel."""
    return {
        "SUBS_PAD": _power_of_two(subs),
        "CHUNKS_PAD": _power_of_two(chunks),
        "TILE": tuning.tile,
        "LIST": tuning.listed,
        "MOST_SPLITS": _MOST_SPLITS,
        "TOP": top or 1,
        "NOT_FINITE": codes.not_finite,
        "NONE_ALLOWED": codes.none_allowed,
    }


def _arrays(
    count: int, vocab: int, subs: int, chunks: int, splits: int, tuning: Tuning, top: int | None, *, changed: bool
) -> _Arrays:
    """Return the shapes of what the kernels write. `changed`: rows may have constraints."""
    each, block, part = (count,), (count, subs), (count, splits)
    blocks = {"tops": _out(block), "masses": _out(block), "firsts": _whole(block), "finite": _whole((count, chunks))}
    blocks["moments"] = _out((count, chunks, 4))
    if changed:
        blocks["changed"] = _out((count, vocab))
    listed = (*part, tuning.listed)
    parts = {"near": _whole(block), "distances": _out(listed), "tokens": _whole(listed)}
    parts |= {"bests": _out((*part, 2)), "best_tokens": _whole(part)}
    rows = {"drawn": _whole(each), "reaches": _out(each), "kept": _out(each)}
    if top is not None:
        blocks |= {"raw_tops": _out(block), "raw_masses": _out(block)}
        rows |= {"chosen_logs": _out(each), "drawn_logs": _out(each), "ranks": _whole(each)}
        rows |= {"top_ids": _whole((count, top)), "top_logs": _out((count, top))}
    return _Arrays(blocks, parts, rows)


def packed(rows: SamplingRows) -> Int[Array, "R C"]:
    """Return the records of rows: the columns of `kernel_rows`, then drafts and banned tokens."""

    def bits(values: Array) -> Array:
        return values if values.dtype == jnp.int32 else lax.bitcast_convert_type(values, jnp.int32)

    columns = [
        *(getattr(rows, name) for name in OPTIONS),
        *(rows.keys[:, 0], rows.keys[:, 1], rows.positions, rows.table, rows.by_place, rows.finite.astype(jnp.int32)),
    ]
    fixed = jnp.stack([bits(column) for column in columns], axis=1)
    return jnp.concatenate([fixed, jnp.zeros((len(fixed), 1), jnp.int32), rows.drafts, rows.banned], axis=1)


def _operands(tables: Tables | None) -> dict[str, Array | int | None]:
    return dict.fromkeys(Tables._fields) if tables is None else dict(tables._asdict())


def _missing(names: tuple[str, ...], there: _Shapes) -> dict[str, None]:
    """Return None for the arguments of arrays that there are not."""
    return {name: None for name in names if name not in there}


def _sizes_of(rows: SamplingRows, tables: Tables | None) -> dict[str, int]:
    """Return the static sizes of what constraints read."""
    drafts, bans = rows.drafts.shape[1], rows.banned.shape[1]
    if tables is None:
        return {"WORDS": 1, "PLACES": 0, "DRAFTS": drafts, "BANS": bans, "BIASES": 1}
    places = 0 if tables.ahead is None else tables.ahead.shape[1]
    words, biases = tables.mask.shape[1], tables.bias.shape[1]
    return {"WORDS": words, "PLACES": places, "DRAFTS": drafts, "BANS": bans, "BIASES": biases}


def _out(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]


def _whole(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)  # type: ignore[no-untyped-call]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
