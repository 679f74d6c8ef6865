"""Slow reference implementations: attention in NumPy by position, dense attention, sampling by sorting.

`dense_logits` runs the engine's own decoder with dense attention. So tests that compare an engine with it prove paging,
scheduling and sampling, not the model: only the parity fixtures, made by transformers, prove that.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach, Rope
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.xla import sample
from jswa.exec.programs.state import DeviceState
from jswa.exec.runner import Runner
from jswa.model.attention import Attend
from jswa.model.binding import bind, param_shapes
from jswa.model.transformer import Params
from pallas_kernels.experts.api import Implementation


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a step: positions [start, start + count); its page table begins at page position `first_page`."""

    start: int
    count: int
    first_page: int = 0
    visible_from: int = 0

    @property
    def end(self) -> int:
        """One past the row's last position."""
        return self.start + self.count

    def keys(self, position: int, window: int | None, chunk: int | None = None, lookback: int = 0) -> range:
        """Return the positions that the query at `position` sees."""
        first = 0 if window is None else position - window + 1
        if chunk is not None:
            first = position - position % chunk - lookback * chunk
        return range(max(self.visible_from, first), position + 1)


def paged_attention(
    q: Float[np.ndarray, "T H D"],
    kv: Float[np.ndarray, "P S K p E"],
    rows: list[Row],
    page_rows: Int[np.ndarray, "R N"],
    *,
    layer_index: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
    lookback: int = 0,
    sinks: Float[np.ndarray, " H"] | None = None,
    smallest: float = 0.0,
) -> tuple[Float[np.ndarray, "tokens H V"], Float[np.ndarray, "tokens H"]]:
    """Return attention of the rows' tokens in float64, computed by query and head, and the size of a rounding.

    A sink acts as one more key: its score is the sink, without scale and softcap, and its value is zero. The second
    result times the unit roundoff is the length of the error that rounding each weight, on its own, makes in a token's
    and head's result: the root of the sum of the squares of weight times length of the value. `smallest`: the least
    error of a weight, as a share of the unit roundoff, where weights are at most 1.
    """
    head_dim, page_size, group = q.shape[2], kv.shape[3], q.shape[1] // kv.shape[2]
    out: list[Float[np.ndarray, "H V"]] = []
    roundings: list[list[float]] = []
    for row, pages in zip(rows, page_rows, strict=True):
        for position in range(row.start, row.end):
            query = q[len(out)].astype(np.float64)
            keys = np.array(row.keys(position, window, chunk, lookback))
            seen = kv[pages[keys // page_size - row.first_page], layer_index, :, keys % page_size].astype(np.float64)
            heads = []
            roundings.append([])
            for head in range(q.shape[1]):
                cells = seen[:, head // group]
                score = cells[:, :head_dim] @ query[head] * scale
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                values = cells[:, head_dim:]
                if sinks is not None:
                    score = np.append(score, sinks[head])
                    values = np.concatenate([values, np.zeros((1, values.shape[1]))])
                weight = np.exp(score - score.max())
                heads.append(weight @ values / weight.sum())
                lengths = np.linalg.norm(values, axis=1)
                roundings[-1].append(float(np.linalg.norm(np.maximum(weight, smallest) * lengths) / weight.sum()))
            out.append(np.stack(heads))
    return np.stack(out), np.array(roundings)


def kept_tokens(scaled: Float[np.ndarray, " V"], top_k: int, top_p: float) -> Bool[np.ndarray, " V"]:
    """Return which tokens remain after top-k, then top-p; all tokens that tie with the last one remain."""
    order = np.argsort(-scaled, kind="stable")
    wide = scaled.astype(np.float64)
    count = min(top_k, len(scaled)) if top_k > 0 else len(scaled)
    kept: Bool[np.ndarray, " V"] = wide >= wide[order[count - 1]]
    if top_p >= 1:
        return kept
    weight = np.where(kept, np.exp(wide - wide.max()), 0.0)
    reached = np.cumsum(weight[order] / weight.sum()) >= top_p
    last = int(np.argmax(reached)) if reached.any() else len(scaled) - 1
    return kept & np.asarray(wide >= wide[order[last]])


def dense_attention(model: ModelConfig) -> Attend:
    """Return attention over a whole text at once, for one row that starts at position 0."""
    stored: dict[int, Float[Array, "T K E"]] = {}

    def attend(
        layer: int, q: Float[Array, "T H D"], kv: Float[Array, "T K E"] | None, sinks: Float[Array, " H"] | None
    ) -> Float[Array, "T H V"]:
        config = model.layers[layer].attention
        if kv is None:
            assert config.kv_from is not None
            kv = stored[config.kv_from]
        stored[layer] = kv
        k, v = kv[..., : config.head_dim], kv[..., -config.v_head_dim :]
        group = config.num_heads // config.num_kv_heads
        scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, group, axis=1)) * config.scale
        if config.softcap is not None:
            scores = config.softcap * jnp.tanh(scores / config.softcap)
        query, key = np.arange(len(q))[:, None], np.arange(len(q))[None]
        visible = key <= query
        if config.reach is not None:
            near = query // config.reach.size - key // config.reach.size <= config.reach.lookback
            visible &= near if config.reach.chunked else query - key < config.reach.size
        top = jnp.where(visible[None], scores, -jnp.inf).max(axis=-1, keepdims=True)
        top = top if sinks is None else jnp.maximum(top, sinks[:, None, None])
        weights = jnp.where(visible[None], jnp.exp(scores - top), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total if sinks is None else total + jnp.exp(sinks[:, None, None] - top))
        return jnp.einsum("hts,shv->thv", weights, jnp.repeat(v, group, axis=1))

    return attend


def dense_logits(
    model: ModelConfig,
    params: Params,
    tokens: Int[np.ndarray, " T"],
    *,
    compiled: bool = False,
    experts: Implementation = "xla",
) -> Float[np.ndarray, "T V"]:
    """Return logits of every position by one forward without pages. `compiled` is faster for long texts."""

    def run(params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
        decoder = bind(model, params, experts)
        return decoder.logits(decoder(tokens, jnp.arange(len(tokens)), dense_attention(model)))

    return np.asarray((jax.jit(run) if compiled else run)(params, jnp.asarray(tokens)))


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile without optimisation, for tests that spend most of their time compiling."""
    config: Any = jax.config
    before = config.read("jax_disable_most_optimizations")
    config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        config.update("jax_disable_most_optimizations", before)


def small_model(
    pattern: str,
    *,
    window: int = 8,
    d_model: int = 32,
    heads: tuple[int, int, int] = (2, 1, 8),
    vocab: int = 61,
    max_position: int = 4096,
) -> ModelConfig:
    """Return a decoder with one layer per letter, `L` for sliding and `F` for full; `heads`: (query, KV, size)."""
    norm = Norm(1e-6)
    num_heads, num_kv_heads, head_dim = heads
    rope = Rope(tuple((10_000.0 ** -(np.arange(0, head_dim, 2) / head_dim)).tolist()))
    full = AttentionConfig(num_heads, num_kv_heads, head_dim, head_dim, scale=head_dim**-0.5, rope=rope)
    attention = {"F": full, "L": dataclasses.replace(full, reach=Reach(window))}
    layers = [LayerConfig(attention[x], MlpConfig(2 * d_model, "silu"), norm, None, norm, None) for x in pattern]
    return ModelConfig("small", vocab, d_model, max_position, tuple(layers), norm, tie_embeddings=False)


def random_params(model: ModelConfig, seed: int = 0) -> Params:
    """Return parameters for logits of about unit size: matrices N(0, 1/fan_in), vectors 1 + 0.1 N(0, 1)."""
    rng = np.random.default_rng(seed)
    params: Params = {}
    for name, shape in param_shapes(model, jnp.dtype("float32")).items():
        noise = rng.standard_normal(shape.shape)
        fan_in = 1 if name == "embed" else shape.shape[0]
        params[name] = jnp.asarray(noise / math.sqrt(fan_in) if len(shape.shape) > 1 else 1 + 0.1 * noise, jnp.float32)
    return params


@functools.cache
def small_engine_parts() -> tuple[ModelConfig, Params, KVLayout, Limits, Runner]:
    """Return a small hybrid model and its runner, shared by all tests of a process; the arena is full of NaN at first.

    A slab has two full pages; a lane has 3.3 MB, far more than any activation. Engines may use fewer slabs, rows and
    tokens than the runner was compiled for.
    """
    model = small_model("LLF", window=64)
    params = random_params(model)
    limits = Limits(max_model_len=2_304, max_rows=3, max_tokens=16, page_size=16, num_slabs=800)
    layout = KVLayout.of(model, limits.page_size)
    runner = Runner(model, params, layout, limits)
    lanes = [lane.at[:, 1:].set(jnp.nan) for lane in runner.state["lanes"]]
    runner.state = DeviceState(**{**runner.state, "lanes": lanes})
    return model, params, layout, limits, runner


def _sampler(few: int) -> Any:
    return jax.jit(lambda logits, at, rows, logits_state: sample(logits, at, Sampling.of(rows), logits_state, few=few))


_samplers = _sampler(0), _sampler(2)


def sampled(*arguments: Any) -> Int[np.ndarray, " R"]:
    """Sample, given logits, positions, packed parameters and the logits state.

    The tokens are the same if up to two rows with limits or constraints are computed alone.
    """
    tokens, alone = (np.asarray(run(*arguments)) for run in _samplers)
    assert tokens.tolist() == alone.tolist()
    return tokens
