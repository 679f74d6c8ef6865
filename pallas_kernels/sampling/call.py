"""The calls of the Triton kernels of sampling, through jax-triton, an optional package."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.sampling.plan import Codes, Drawn, Logprobs, Rows, Tables, Tuning


def sample(
    logits: Float[Array, "R V"], rows: Rows, tables: Tables | None, codes: Codes, top: int | None, tuning: Tuning
) -> Drawn:
    """See `api.sample`. Raises ImportError if jax-triton is missing."""
    triton.load()
    from pallas_kernels.sampling.kernel_draw import draw  # imports Triton
    from pallas_kernels.sampling.kernel_survey import survey

    count, sizes = len(logits), _sizes(logits, rows, tables, tuning)
    subs, chunks = sizes["SUBS"], sizes["CHUNKS"]
    records = packed(rows)
    given = {"logits": logits, **_operands(tables)}
    raw = [] if top is None else [_out((count, subs)), _out((count, subs))]
    blocks = [
        _out((count, subs)),
        _out((count, subs)),
        _out((count, subs), jnp.int32),
        _out((count, chunks), jnp.int32),
    ]
    found = triton.call(
        survey,
        {"rows": records, **given, **({"raw_tops": None, "raw_masses": None} if top is None else {})},
        [*blocks, _out((count, 5)), _out((count, 2), jnp.int32), *raw],
        (count, chunks),
        sizes,
        warps=8,
        in_place="rows",
    )
    tops, _, _, _, numbers, choices, *logs_of_model, records = found
    lists = [
        _out((count, chunks), jnp.int32),
        _out((count, chunks, tuning.cap)),
        _out((count, chunks, tuning.cap), jnp.int32),
    ]
    logs = (
        []
        if top is None
        else [
            _out((count,)),
            _out((count,)),
            _out((count,), jnp.int32),
            _out((count, top), jnp.int32),
            _out((count, top)),
        ]
    )
    names = ("chosen_logs", "drawn_logs", "ranks", "top_ids", "top_logs")
    splits = max(1, min(chunks, tuning.blocks // count))
    result = triton.call(
        draw,
        {
            "rows": records,
            **given,
            "tops": tops,
            "numbers": numbers,
            "choices": choices,
            "raw_tops": None if top is None else logs_of_model[0],
            **(dict.fromkeys(names) if top is None else {}),
        },
        [*lists, _out((count,), jnp.int32), _out((count,)), _out((count,)), *logs],
        (count, splits),
        {
            **sizes,
            "CAP": tuning.cap,
            "SPLITS": splits,
            "TOP": top or 1,
            "NOT_FINITE": codes.not_finite,
            "NONE_ALLOWED": codes.none_allowed,
        },
        warps=16,
        in_place="rows",
    )
    tokens, reach, mass = result[3:6]
    if top is None:
        return Drawn(tokens, reach, mass, None)
    chosen, drawn, rank, ids, values = result[6:11]
    return Drawn(tokens, reach, mass, Logprobs(chosen, rank, ids, values, drawn))


def packed(rows: Rows) -> Int[Array, "R C"]:
    """Return the records of rows: the columns of `kernel_rows`, of which the last two count arrivals, drafts, bans."""

    def bits(values: Array) -> Array:
        return values if values.dtype == jnp.int32 else lax.bitcast_convert_type(values, jnp.int32)

    columns = [
        *(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency),
        *(rows.keys[:, 0], rows.keys[:, 1], rows.positions, rows.table, rows.by_place, rows.finite.astype(jnp.int32)),
    ]
    fixed = jnp.stack([bits(column) for column in columns], axis=1)
    none = jnp.zeros((len(fixed), 2), jnp.int32)
    return jnp.concatenate([fixed, none, rows.drafts, rows.banned], axis=1)


def _operands(tables: Tables | None) -> dict[str, Array | int | None]:
    return dict.fromkeys(Tables._fields) if tables is None else dict(tables._asdict())


def _sizes(logits: Float[Array, "R V"], rows: Rows, tables: Tables | None, tuning: Tuning) -> dict[str, int]:
    vocab = logits.shape[1]
    subs = -(-vocab // tuning.sub)
    chunks = -(-subs // tuning.tile)
    drafts, bans = rows.drafts.shape[1], rows.banned.shape[1]
    ahead = None if tables is None else tables.ahead
    return {
        "VOCAB": vocab,
        "SUBS": subs,
        "CHUNKS": chunks,
        "SUB": tuning.sub,
        "TILE": tuning.tile,
        "RECORD": 15 + drafts + bans,
        "WORDS": 1 if tables is None else tables.mask.shape[1],
        "PLACES": 0 if ahead is None else ahead.shape[1],
        "DRAFTS": drafts,
        "BANS": bans,
        "BIASES": 1 if tables is None else tables.bias.shape[1],
        "SUBS_PAD": _power_of_two(subs),
        "CHUNKS_PAD": _power_of_two(chunks),
    }


def _out(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
