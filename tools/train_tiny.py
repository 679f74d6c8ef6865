"""Train the embedded model `tiny` from scratch and write its checkpoint: what `make tiny` runs.

The engine's own decoder is trained, with a dense attention in place of the paged one, on stories that
`tools.tiny_corpus` writes. Everything is seeded: the same arguments on the same machine give the same weights, unless
--minutes cuts the run short.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.model.attention import Attend
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params, bind, param_shapes
from tools.tiny_checkpoint import (
    BOS,
    EOS,
    HELD_OUT,
    PAD,
    config_json,
    encode,
    model_card,
    round_to_stored,
    write_checkpoint,
)
from tools.tiny_corpus import stories

DEFAULT_OUT = Path(__file__).parent.parent / "jswa" / "assets" / "tiny"
CORES, BLOCK = 2, 128
ROWS, LENGTH = 4, 640  # of one training step; a row holds a story and most of the next one
STEPS, PEAK, WARM_UP = 1400, 1e-2, 0.03
HELD_OUT_SEED = 1_000_003  # of stories that are not trained on
PROMPTS = ("Once upon a time", "The cat", "A long time ago, in a small village")

ALL, SPLIT = PartitionSpec(), PartitionSpec("rows")  # type: ignore[no-untyped-call]

Batch = Int[Array, "B T"]
Step = Callable[[Params, Any, Batch, float], tuple[Params, Any, Array]]


def dense_attend(config: ModelConfig) -> Attend:
    """Causal attention of one whole sequence; the signature that the paged attention has too."""

    def attend(
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        _sinks: Float[Array, " H"] | None,
        /,
    ) -> Float[Array, "T H V"]:
        assert kv is not None
        k, v = jnp.split(kv, 2, axis=-1)
        attention = config.layers[layer].attention
        return (
            _full(attention, q, k, v) if attention.reach is None else _local(attention, attention.reach.size, q, k, v)
        )

    return attend


def _full(a: AttentionConfig, q: Array, k: Array, v: Array) -> Array:
    """Block by block of queries, each on the keys up to its end: about half of all T · T scores."""
    length, outs = len(q), []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
        outs.append(_attention(a, q[start:end], k[:end], v[:end], visible))
    return jnp.concatenate(outs)


def _local(a: AttentionConfig, window: int, q: Array, k: Array, v: Array) -> Array:
    """A block of `window` queries sees keys of its own block and of the one before: T · 2W scores, not T · T."""
    length = len(q)
    pad = -length % window

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, pad), (0, 0), (0, 0))).reshape(-1, window, *x.shape[1:])

    def with_previous(x: Array) -> Array:
        return jnp.concatenate([jnp.roll(x, 1, axis=0), x], axis=1)

    keys = jnp.arange(2 * window)[None, :]
    queries = jnp.arange(window)[:, None] + window
    visible = (keys <= queries) & (keys > queries - window)
    first = jnp.arange((length + pad) // window)[:, None, None] == 0
    visible = visible[None] & ~(first & (keys < window)[None])
    out = jax.vmap(lambda *x: _attention(a, *x))(blocks(q), with_previous(blocks(k)), with_previous(blocks(v)), visible)
    return out.reshape(-1, *out.shape[2:])[:length]


def _attention(a: AttentionConfig, q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Softmax attention [T, H, V] of T queries on S keys under the mask `visible` [T, S].

    Query heads of one KV head are stacked as rows of one matrix product, which XLA's CPU backend does faster.
    """
    rows = q.reshape(len(q), a.num_kv_heads, -1, a.head_dim).transpose(1, 2, 0, 3)
    groups = rows.shape[1]
    scores = (rows.reshape(a.num_kv_heads, -1, a.head_dim) * a.scale) @ k.transpose(1, 2, 0)
    scores = jnp.where(jnp.tile(visible, (groups, 1))[None], scores, -1e30)
    powers = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = (powers @ v.transpose(1, 0, 2)) / powers.sum(axis=-1, keepdims=True)
    out = out.reshape(a.num_kv_heads, groups, len(q), a.v_head_dim).transpose(2, 0, 1, 3)
    return out.reshape(len(q), a.num_heads, a.v_head_dim)


def token_losses(config: ModelConfig, params: Params, tokens: Batch) -> Float[Array, "B T-1"]:
    """Negative log-likelihood, in nats, of every token given those before it in its row; 0 for padding."""
    decoder, attend = bind(config, params), dense_attend(config)
    positions = jnp.arange(tokens.shape[1] - 1)

    def row(ids: Int[Array, " T"]) -> Float[Array, " T-1"]:
        logits = decoder.logits(decoder(ids[:-1], positions, attend))
        loss: Array = optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:])
        return jnp.where(ids[1:] == PAD, 0.0, loss)

    return jax.vmap(row)(tokens)


def init_params(config: ModelConfig, seed: int) -> Params:
    """float32 matrices N(0, 1/inputs); norms scale by 1, which gemma stores as 0."""
    params: Params = {}
    key = jax.random.key(seed)
    for index, (name, leaf) in enumerate(sorted(param_shapes(config, jnp.dtype(jnp.float32)).items())):
        if leaf.ndim == 2:
            fan_in = leaf.shape[1] if name == "embed" else leaf.shape[0]
            params[name] = jax.random.normal(jax.random.fold_in(key, index), leaf.shape) * fan_in**-0.5
        else:
            params[name] = jnp.zeros(leaf.shape)
    return params


def batches(seed: int) -> Iterator[Int[np.ndarray, "B T"]]:
    """Training rows without end: each starts with a story, and the next ones follow as far as the row goes."""
    source = stories(seed)
    while True:
        yield np.array([_row(source) for _ in range(ROWS)], np.int32)


def _row(source: Iterator[str]) -> list[int]:
    ids: list[int] = []
    while len(ids) <= LENGTH:
        ids += [BOS, *encode(next(source)), EOS]
    return ids[: LENGTH + 1]


def make_step(config: ModelConfig) -> tuple[Step, Callable[[Params], Any]]:
    """One jitted AdamW step (its learning rate is an argument) and the function that makes the optimizer's state."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(0.1, mask=lambda params: {name: x.ndim == 2 for name, x in params.items()}),
    )
    gradients = parallel_gradients(config)

    def step(params: Params, state: Any, tokens: Batch, rate: float) -> tuple[Params, Any, Array]:
        loss, grads = gradients(params, tokens)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
        return {name: value - rate * updates[name] for name, value in params.items()}, state, loss

    return jax.jit(step, donate_argnums=(0, 1)), optimizer.init


def parallel_gradients(config: ModelConfig) -> Callable[[Params, Batch], tuple[Array, Params]]:
    """Mean loss and its gradient: rows are split over the devices, and each device takes one row at a time.

    On a CPU a device is a core, and the intermediate values of one row stay in its cache: several times faster than
    one program over all rows.
    """
    row_gradient = jax.value_and_grad(lambda params, row: token_losses(config, params, row[None]).mean())

    def share(params: Params, tokens: Batch) -> tuple[Array, Params]:
        def add_row(total: tuple[Array, Params], row: Int[Array, " T"]) -> tuple[tuple[Array, Params], None]:
            return jax.tree.map(jnp.add, total, row_gradient(params, row)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add_row, zero, tokens)
        mean: tuple[Array, Params] = jax.tree.map(_mean_of_rows, total)
        return mean

    return jax.shard_map(share, mesh=row_mesh(), in_specs=(ALL, SPLIT), out_specs=ALL, check_vma=False)


def _mean_of_rows(x: Array) -> Array:
    mean: Array = jax.lax.psum(x, "rows") / ROWS  # type: ignore[no-untyped-call]
    return mean


def row_mesh() -> Mesh:
    """As many devices as share a batch evenly."""
    return Mesh(np.array(jax.local_devices()[: math.gcd(ROWS, jax.local_device_count())]), ("rows",))


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine to 0 at progress 1."""
    if progress < WARM_UP:
        return PEAK * max(progress, 1e-3) / WARM_UP
    return PEAK * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def train(config: ModelConfig, seed: int, steps: int, minutes: float) -> tuple[Params, int]:
    """Parameters and the number of steps taken: `steps`, or as many as fit in `minutes`, with a shorter schedule."""
    step, init_state = make_step(config)
    params = init_params(config, seed)
    params, state = jax.device_put((params, init_state(params)), NamedSharding(row_mesh(), ALL))
    start, taken = time.monotonic(), 0
    for index, tokens in enumerate(batches(seed)):
        spent = (time.monotonic() - start) / (60 * minutes)
        progress = max(index / steps, spent)
        if progress >= 1:
            break
        params, state, loss = step(params, state, jnp.asarray(tokens), learning_rate(progress))
        taken = index + 1
        if index % 25 == 0:
            bits, seconds = float(loss) / math.log(2), time.monotonic() - start
            print(f"step {index:5d}  {bits:.3f} bits per token  {seconds:6.1f} s", flush=True)
    print(f"{taken} steps, {taken * ROWS * LENGTH} tokens, {time.monotonic() - start:.0f} s")
    return params, taken


def held_out_bits(config: ModelConfig, params: Params, count: int = HELD_OUT) -> float:
    """Bits per byte of stories that were not trained on, each on its own, its end token included."""
    source = stories(HELD_OUT_SEED)
    texts = [next(source) for _ in range(count)]
    rows = [[BOS, *encode(text), EOS] for text in texts]
    width = max(map(len, rows))
    tokens = np.array([row + [PAD] * (width - len(row)) for row in rows], np.int32)
    losses = jax.jit(lambda p, t: token_losses(config, p, t))
    nats = sum(float(losses(params, jnp.asarray(some)).sum()) for some in np.split(tokens, max(1, count // 16)))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def print_samples(folder: Path, count: int) -> None:
    """Stories from the checkpoint as written, by the engine."""
    from jswa.llm import LLM

    with LLM(folder) as llm:
        for output in llm.generate(list(PROMPTS[:count]), max_tokens=800, temperature=0.6, seed=0, use_tqdm=False):
            last = output.outputs[0]
            print(f"\n[{last.finish_reason}] {output.prompt}{last.text}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write, measure."""
    options = _options(argv)
    config = parse_config(config_json())
    start = time.monotonic()
    params, steps = train(config, options.seed, options.steps, options.minutes)
    params, size = round_to_stored(params), sum(x.size for x in params.values())
    bits = held_out_bits(config, params)
    print(f"held-out: {bits:.4f} bits per byte; {size} parameters")
    card = model_card(parameters=size, bits=bits, steps=steps, tokens=steps * ROWS * LENGTH, seed=options.seed)
    write_checkpoint(options.out, config, params, card)
    print(f"{options.out} written after {time.monotonic() - start:.0f} s")
    if options.samples:
        print_samples(options.out, options.samples)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model and write its checkpoint.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="longest training time")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=len(PROMPTS), help="stories to print at the end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", CORES)  # type: ignore[no-untyped-call]
    main()
