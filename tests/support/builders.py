"""Builders for tests: models without weights, arena layouts, sampling columns and requests."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from jaxtyping import Int
from numpy.typing import ArrayLike

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach
from jswa.cache.layout import KVLayout
from jswa.plan import COLUMNS, SAMPLING, SAMPLING_REALS, Request, RequestOptions, StepPlan
from jswa.types import SamplingParams

NO_LOGITS_STATE = 2**30  # past the end of the logits state
LAYOUTS = {  # numbers of full and local layers, for make_layout
    "full only": (1, 0),
    "local only": (0, 1),
    "hybrid, m = 1": (1, 1),
    "hybrid, m = 2": (1, 2),
    "hybrid, m = 6": (1, 6),
}
_NORM = Norm(1e-6)


def share(part: int) -> settings:
    """Return settings with one `part`-th of the profile's examples, in every profile."""
    return settings(max_examples=max(1, settings().max_examples // part))


def reach_of(reach: int | Reach | None) -> Reach | None:
    """Return a reach; a number is a sliding window of that size."""
    return Reach(reach) if isinstance(reach, int) else reach


def sampling_columns(rows: int, **values: Any) -> Int[np.ndarray, "R C"]:
    """Return packed sampling parameters: greedy rows without limits or logits state, except for the values given."""
    plain: dict[str, Any] = {"top_p": 1.0, "repetition": 1.0, "logits_state": NO_LOGITS_STATE}
    columns = []
    for name in SAMPLING:
        value = values.get(name, plain.get(name, 0))
        real = name in SAMPLING_REALS
        kind = np.float32 if real else np.uint32 if name.startswith("key") else np.int32
        columns.append(np.broadcast_to(np.asarray(value).astype(kind), rows).copy().view(np.int32))
    return np.stack(columns, axis=1)


def make_plan(row_ids: ArrayLike, starts: ArrayLike, counts: ArrayLike, **others: Any) -> StepPlan:
    """Return a plan of rows that sample, with tokens 0, greedy parameters and no pages, except for the values given.

    Args:
        others: columns of the rows, `sampling` (all its columns), and fields of `StepPlan`.
    """
    rows: Int[np.ndarray, "R C"] = np.zeros((len(np.asarray(row_ids)), len(COLUMNS)), np.int32)
    rows[:, -len(SAMPLING) :] = others.pop("sampling", sampling_columns(len(rows)))
    columns: dict[str, Any] = {"row_id": row_ids, "start": starts, "count": counts, "samples": 1}
    columns |= {name: others.pop(name) for name in COLUMNS if name in others}
    for name, values in columns.items():
        rows[:, COLUMNS.index(name)] = values
    none = np.zeros((0, 3), np.int32)
    fields: dict[str, Any] = {"full_pages": none, "local_pages": none, "moves": none}
    fields["tokens"] = np.zeros(rows[:, COLUMNS.index("count")].sum(), np.int32)
    return StepPlan(rows=rows, **fields | others)


def changed(plan: StepPlan, **columns: ArrayLike) -> StepPlan:
    """Return a plan with other values in some columns of its rows."""
    rows = plan.rows.copy()
    for name, values in columns.items():
        rows[:, COLUMNS.index(name)] = values
    return dataclasses.replace(plan, rows=rows)


def make_layer(reach: int | Reach | None, heads: tuple[int, int, int]) -> LayerConfig:
    """Return a layer with the attributes that the arena's layout needs; `heads`: (KV heads, head size, value size)."""
    kv_heads, head_dim, v_head_dim = heads
    attention = AttentionConfig(kv_heads, kv_heads, head_dim, v_head_dim, scale=1.0, rope=None, reach=reach_of(reach))
    return LayerConfig(attention, MlpConfig(8, "silu"), _NORM, None, _NORM, None)


def make_model(*layers: LayerConfig, vocab: int = 64, max_position: int = 2**20) -> ModelConfig:
    """Return a model of these layers."""
    return ModelConfig("fake", vocab, 8, max_position, layers, _NORM, tie_embeddings=True)


def make_layout(page_size: int, reach: int | Reach | None, *, num_full: int, num_local: int) -> KVLayout:
    """Return a layout of equal layers, the last `num_full` full; with one full layer, m is `num_local`."""
    heads = (1, 2, 2)
    layers = [make_layer(reach, heads)] * num_local + [make_layer(None, heads)] * num_full
    return KVLayout.of(make_model(*layers), page_size)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    length: int,
    stop_ids: Collection[int] = (),
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
) -> Request:
    """Return a request of at most `length` tokens with its prompt. A tenant's prefixes are its own."""
    params, ids = SamplingParams(stop_token_ids=tuple(stop_ids)), np.array(prompt, np.int32)
    stops = frozenset(stop_ids)
    options = RequestOptions(priority, tenant, tenant=tenant, weight=weight)
    return Request(name, ids, params, stops, (0, 0), length, options, cache_salt=tenant)
