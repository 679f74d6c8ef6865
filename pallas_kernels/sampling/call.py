"""The calls of the Triton kernels of sampling, through jax-triton, an optional package.

The kernels do not depend on the number of rows, so that a process compiles them once for all its programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.sampling.plan import Codes, Drawn, Logprobs, Rows, Tables, Tuning

_MOST_SPLITS = 32


def sample(
    logits: Float[Array, "R V"], rows: Rows, tables: Tables | None, codes: Codes, top: int | None, tuning: Tuning
) -> Drawn:
    """See `api.sample`. Raises ImportError if jax-triton is missing."""
    triton.load()
    from pallas_kernels.sampling.kernel_draw import draw  # imports Triton
    from pallas_kernels.sampling.kernel_survey import survey

    count, vocab = logits.shape
    records, subs = packed(rows), -(-vocab // tuning.sub)
    chunks, splits = -(-subs // tuning.chunk), max(1, min(_MOST_SPLITS, tuning.drawers // count))
    parts = max(1, min(chunks, tuning.readers // count))
    sizes = {
        "VOCAB": vocab,
        "SUBS": subs,
        "CHUNKS": chunks,
        "SUB": tuning.sub,
        "RECORD": records.shape[1],
    }
    floats, whole = _out((count, subs)), _out((count, chunks), jnp.int32)
    raw = {} if top is None else {"raw_tops": floats, "raw_masses": floats}
    changed = {} if tables is None else {"changed": _out(logits.shape)}
    found = triton.call(
        survey,
        {"rows": records, "logits": logits, **_operands(tables), **_absent(changed, raw)},
        [floats, floats, _out((count, subs), jnp.int32), whole, *changed.values(), *raw.values()],
        (count, parts),
        {**sizes, **_sizes_of(rows, tables), "TILE": tuning.chunk},
        warps=8,
    )
    names = ("tops", "masses", "firsts", "finite", *changed, *raw)
    logs = {} if top is None else _log_shapes(count, top)
    result = triton.call(
        draw,
        {
            "rows": records,
            "logits": logits,
            **dict(zip(names, found, strict=True)),
            **_absent(changed, raw, logs),
        },
        [
            *(_out((count, subs), jnp.int32), _out((count, splits, tuning.listed))),
            *(_out((count, splits, tuning.listed), jnp.int32), _out((count, splits, 2))),
            *(_out((count, splits), jnp.int32), _out((count,), jnp.int32), _out((count,)), _out((count,))),
            *logs.values(),
        ],
        (count, splits),
        {
            **sizes,
            "TILE": tuning.tile,
            "SUBS_PAD": _power_of_two(subs),
            "CHUNKS_PAD": _power_of_two(chunks),
            "LIST": tuning.listed,
            "MOST_SPLITS": _MOST_SPLITS,
            "TOP": top or 1,
            "NOT_FINITE": codes.not_finite,
            "NONE_ALLOWED": codes.none_allowed,
        },
        warps=16,
        in_place="rows",
    )
    tokens, reach, mass, *more = result[5:-1]
    if top is None:
        return Drawn(tokens, reach, mass, None)
    chosen, drawn, rank, ids, values = more
    return Drawn(tokens, reach, mass, Logprobs(chosen, rank, ids, values, drawn))


def packed(rows: Rows) -> Int[Array, "R C"]:
    """Return the records of rows: the columns of `kernel_rows`, then drafts and banned tokens."""

    def bits(values: Array) -> Array:
        return values if values.dtype == jnp.int32 else lax.bitcast_convert_type(values, jnp.int32)

    columns = [
        *(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency),
        *(rows.keys[:, 0], rows.keys[:, 1], rows.positions, rows.table, rows.by_place, rows.finite.astype(jnp.int32)),
    ]
    fixed = jnp.stack([bits(column) for column in columns], axis=1)
    return jnp.concatenate([fixed, jnp.zeros((len(fixed), 1), jnp.int32), rows.drafts, rows.banned], axis=1)


def _operands(tables: Tables | None) -> dict[str, Array | int | None]:
    return dict.fromkeys(Tables._fields) if tables is None else dict(tables._asdict())


def _absent(changed: dict[str, Any], raw: dict[str, Any], logs: dict[str, Any] | None = None) -> dict[str, None]:
    """Return None for the arguments of arrays that there are not."""
    names = [] if changed else ["changed"]
    names += [] if raw else ["raw_tops", "raw_masses"]
    names += [] if logs is None or logs else ["chosen_logs", "drawn_logs", "ranks", "top_ids", "top_logs"]
    return dict.fromkeys(names)


def _log_shapes(count: int, top: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of log probabilities by argument, in the order of the kernel's."""
    each, of_top = _out((count,)), (count, top)
    return {
        "chosen_logs": each,
        "drawn_logs": each,
        "ranks": _out((count,), jnp.int32),
        "top_ids": _out(of_top, jnp.int32),
        "top_logs": _out(of_top),
    }


def _sizes_of(rows: Rows, tables: Tables | None) -> dict[str, int]:
    """Return the static sizes of what constraints read."""
    drafts, bans = rows.drafts.shape[1], rows.banned.shape[1]
    if tables is None:
        return {"WORDS": 1, "PLACES": 0, "DRAFTS": drafts, "BANS": bans, "BIASES": 1}
    places = 0 if tables.ahead is None else tables.ahead.shape[1]
    words, biases = tables.mask.shape[1], tables.bias.shape[1]
    return {"WORDS": words, "PLACES": places, "DRAFTS": drafts, "BANS": bans, "BIASES": biases}


def _out(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
