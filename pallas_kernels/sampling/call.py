"""The calls of the Triton kernels of sampling, through jax-triton, an optional package."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.sampling.plan import COUNTED, FREE, GREEDY, NUCLEUS, Limits, Summary, Tuning

# Gumbel noise of jax.random lies between -log(-log(2^-126)) and -log(-log(1 - 2^-23)): 20.42 apart.
_FREE_REACH = 20.5


class _Prepared(NamedTuple):
    """A row's limits, as the kernels read them."""

    kind: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    floor: Float[Array, " R"]


def summarize(logits: Float[Array, "R V"], limits: Limits, tuning: Tuning) -> Summary:
    """See `api.summarize`. Raises ImportError if jax-triton is missing."""
    triton.load()
    from pallas_kernels.sampling import kernel  # imports Triton

    rows, vocab = logits.shape
    own, sizes = _prepared(limits, vocab), _sizes(vocab, tuning)
    subs, chunks = sizes["SUBS"], sizes["CHUNKS"]
    tops, masses, finite = triton.call(
        kernel.scan,
        {"logits": logits, "kind": own.kind, "temperature": own.temperature},
        [_out((rows, subs)), _out((rows, subs)), _out((rows, chunks), jnp.int32)],
        (rows, chunks),
        {**sizes, "SUB": tuning.sub, "TILE": tuning.tile},
        warps=8,
    )
    most, greedy, state, reach, total = triton.call(
        kernel.plan,
        {"logits": logits, **own._asdict(), "tops": tops, "masses": masses, "finite": finite},
        [_out((rows,)), _out((rows,), jnp.int32), _out((rows,), jnp.int32), _out((rows,)), _out((rows,))],
        (rows,),
        {
            **sizes,
            "SUB": tuning.sub,
            "SUBS_PAD": _power_of_two(subs),
            "CHUNKS_PAD": _power_of_two(chunks),
            "FREE_REACH": _FREE_REACH,
        },
        warps=4,
    )
    return Summary(greedy, state >= 2, state % 2 == 1, tops, most, reach, total)


def draw(
    logits: Float[Array, "R V"], keys: Int[Array, "R 2"], limits: Limits, summary: Summary, tuning: Tuning
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """See `api.draw`; the second result is 1 for rows that are not decided."""
    triton.load()
    from pallas_kernels.sampling import kernel  # imports Triton

    rows, vocab = logits.shape
    own, sizes = _prepared(limits, vocab), _sizes(vocab, tuning)
    chunks = sizes["CHUNKS"]
    held = (rows, chunks, tuning.cap)
    counts, distances, tokens = triton.call(
        kernel.collect,
        {
            "logits": logits,
            "kind": own.kind,
            "temperature": own.temperature,
            "keys": keys,
            "tops": summary.tops,
            "most": summary.most,
            "reach": summary.reach,
        },
        [_out((rows, chunks), jnp.int32), _out(held), _out(held, jnp.int32)],
        (rows, chunks),
        {**sizes, "SUB": tuning.sub, "TILE": tuning.tile, "CAP": tuning.cap},
        warps=8,
    )
    drawn, undecided = triton.call(
        kernel.choose,
        {
            "kind": own.kind,
            "keys": keys,
            "top_k": own.top_k,
            "top_p": own.top_p,
            "greedy": summary.greedy,
            "total": summary.total,
            "counts": counts,
            "distances": distances,
            "tokens": tokens,
        },
        [_out((rows,), jnp.int32), _out((rows,), jnp.int32)],
        (rows,),
        {"VOCAB": vocab, "CHUNKS": chunks, "CHUNKS_PAD": _power_of_two(chunks), "CAP": tuning.cap},
        warps=16,
    )
    return drawn, undecided


def _prepared(limits: Limits, vocab: int) -> _Prepared:
    top_k = jnp.where(limits.top_k >= vocab, 0, limits.top_k)
    floor = jnp.where(limits.min_p > 0.0, -jnp.log(limits.min_p), jnp.inf)
    kind = jnp.where(limits.top_p < 1.0, NUCLEUS, FREE)
    kind = jnp.where((top_k > 0) | (limits.min_p > 0.0), COUNTED, kind)
    kind = jnp.where(limits.temperature > 0, kind, GREEDY)
    return _Prepared(kind.astype(jnp.int32), limits.temperature, top_k, limits.top_p, floor)


def _sizes(vocab: int, tuning: Tuning) -> dict[str, int]:
    subs = -(-vocab // tuning.sub)
    return {"VOCAB": vocab, "SUBS": subs, "CHUNKS": -(-subs // tuning.tile)}


def _out(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
