"""Train a draft head for `tiny` and write its checkpoint, in the EAGLE-3 format of speculators: `make tiny-draft`.

The head reads hidden states of the shipped model over stories and learns the model's next tokens. As when it drafts, it
then goes on from its own output: twice more, with the text's tokens (Li et al. 2025, "training-time test"). What it
learns is the engine's own drafter, with dense attention. Everything is seeded.
"""

import argparse
import json
import math
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file

from jswa.architecture import ModelConfig
from jswa.model.binding import bind, bound, shapes_of
from jswa.model.drafters.eagle import Eagle, EagleModule
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.hub import TINY, TINY_DRAFT
from tools.tiny.attention import dense_attend
from tools.tiny.optimizer import learning_rate, muon
from tools.tiny.texts import stories
from tools.tiny.tokenizer import BOS, EOS, encode

TAPS, STEPS, ROWS, LENGTH, DEPTH = (2, 3, 5), 400, 8, 192, 3
EVERY = 25
_LATER = 0.8  # weight of a depth, compared to the one before
LAYER = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
}


def head_of(target: ModelConfig) -> Eagle:
    """Return the drafter, without parameters."""
    model = parse_config({**LAYER, "tie_word_embeddings": False})
    return Eagle(
        model=model,
        taps=TAPS,
        target_layers=len(target.layers),
        target_width=target.d_model,
        draft_vocab=model.vocab_size,
        windows=(None,),
        own_embed=False,
        own_head=True,
        subset=False,
        embed_scale=target.embed_scale,
        norm_before_residual=True,
    )


def start(head: Eagle, target: Params, seed: int) -> Params:
    """Return random parameters; the head begins as the model's."""
    params: Params = {}
    for index, (name, leaf) in enumerate(sorted(shapes_of(lambda: head.module(jnp.dtype(jnp.float32))).items())):
        shape = (2 * leaf.shape[0], leaf.shape[1]) if name == "layers.0.attention.qkv" else leaf.shape
        key = jax.random.fold_in(jax.random.key(seed), index)
        noise = jax.random.normal(key, shape) * shape[0] ** -0.5 if len(shape) == 2 else jnp.ones(shape)
        params[name] = noise
    return params | {"lm_head": target["embed"].astype(jnp.float32).T}


def batch(rng: random.Random) -> Int[np.ndarray, "B T"]:
    """Return rows of stories, one behind the other."""
    rows = []
    for _ in range(ROWS):
        ids: list[int] = []
        while len(ids) < LENGTH:
            ids += [BOS, *encode(stories.story(rng)), EOS]
        rows.append(ids[:LENGTH])
    return np.array(rows, np.int32)


def losses(
    target: ModelConfig, head: Eagle, frozen: Params, params: Params, ids: Int[Array, " T"]
) -> tuple[Float[Array, ""], Float[Array, " D"]]:
    """Return the loss of one row, and the share of the model's likeliest tokens that each depth finds."""
    decoder, taps = bind(target, frozen), dict[int, Array]()
    hidden = decoder(ids, jnp.arange(len(ids)), dense_attend(target), tap=taps.__setitem__)
    wanted = jax.lax.stop_gradient(jax.nn.softmax(decoder.logits(hidden)))
    embedded = decoder.inputs_of(ids)
    module: EagleModule = bound(lambda: head.module(jnp.dtype(jnp.float32)), params)
    fused = module.fuse(jnp.concatenate([taps[tap] for tap in head.taps], axis=-1))
    # Position q reads token q and the hidden states of q - 1; position 0 is left out.
    state, length, kept = fused[:-1], len(ids) - 1, list[Array]()
    total, found = jnp.zeros(()), []
    for depth in range(DEPTH):
        count = length - depth
        state = module.run(
            module.embedded(ids[1 + depth :], embedded[1 + depth :]),
            state[:count],
            jnp.arange(1 + depth, 1 + depth + count),
            partial(_attend, head, kept, count),
        )
        assert module.lm_head is not None
        logits = module.final_norm(state) @ module.lm_head[...]
        goal = wanted[1 + depth :]
        total += _LATER**depth * -(goal * jax.nn.log_softmax(logits)).sum(axis=-1).mean()
        found.append((logits.argmax(axis=-1) == goal.argmax(axis=-1)).mean())
    return total, jnp.stack(found)


def _attend(
    head: Eagle, kept: list[Array], count: int, layer: int, q: Array, kv: Array | None, sinks: Array | None
) -> Float[Array, "T H V"]:
    """Attend to the text up to each position, and to what the chain from this position has read itself.

    `kept` has K and V of each depth, which this call adds to.
    """
    assert kv is not None
    kept.append(kv)
    attention = head.layers[0]
    group = attention.num_heads // attention.num_kv_heads
    text, own = kept[0][:count], [one[:count] for one in kept[1:]]
    keys, values = (jnp.repeat(part, group, axis=1) for part in jnp.split(text, 2, axis=-1))
    at = jnp.arange(count)
    scores = jnp.einsum("thd,shd->hts", q, keys) * attention.scale
    scores = jnp.where((at[None] <= at[:, None])[None], scores, -1e30)
    chain = [[jnp.repeat(part, group, axis=1) for part in jnp.split(one, 2, axis=-1)] for one in own]
    more = [(q * one).sum(axis=-1).T[..., None] * attention.scale for one, _ in chain]
    shares = jax.nn.softmax(jnp.concatenate([scores, *more], axis=-1), axis=-1)
    out = jnp.einsum("hts,shd->thd", shares[..., :count], values)
    for index, (_, value) in enumerate(chain):
        out = out + shares[..., count + index].T[..., None] * value
    return out


def train(seed: int, steps: int) -> tuple[Eagle, Params]:
    """Return the trained head."""
    target, frozen = load_checkpoint(TINY, jnp.dtype(jnp.float32))
    head = head_of(target)
    params = start(head, frozen, seed)
    optimizer = muon({name for name, value in params.items() if value.ndim == 2 and name != "lm_head"})
    state: Any = optimizer.init(params)

    def mean(params: Params, ids: Array) -> tuple[Array, Array]:
        loss, found = jax.lax.map(lambda row: losses(target, head, frozen, params, row), ids)
        return loss.mean(), found.mean(axis=0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, ids: Array, rate: float) -> tuple[Params, Any, Array, Array]:
        (loss, found), grads = jax.value_and_grad(mean, has_aux=True)(params, ids)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
            return {name: value + rate * updates[name] for name, value in params.items()}, state, loss, found

    rng, since = random.Random(seed), time.monotonic()
    for number in range(1, steps + 1):
        params, state, loss, found = step(params, state, jnp.asarray(batch(rng)), learning_rate(number / steps))
        if number % EVERY == 0:
            right = " ".join(f"{share:.3f}" for share in found.tolist())
            bits, seconds = float(loss) / math.log(2), time.monotonic() - since
            print(f"step {number:4d}  {bits:.3f} bits  likeliest token {right}  {seconds:4.0f} s", flush=True)
    return head, params


def write(folder: Path, head: Eagle, params: Params) -> None:
    """Write the checkpoint; weights are stored as bfloat16 in torch's [out, in] layout."""
    q, k, v = np.split(np.asarray(params["layers.0.attention.qkv"]).T, [128, 192])
    gate, up = np.split(np.asarray(params["layers.0.mlp.gate_up"]).T, 2)
    tensors = {
        "fc.weight": np.asarray(params["fc"]).T,
        "lm_head.weight": np.asarray(params["lm_head"]).T,
        "norm.weight": params["final_norm.weight"],
        "layers.0.hidden_norm.weight": params["hidden_norm.weight"],
        "layers.0.input_layernorm.weight": params["layers.0.pre_attn.weight"],
        "layers.0.post_attention_layernorm.weight": params["layers.0.pre_mlp.weight"],
        **{f"layers.0.self_attn.{name}_proj.weight": part for name, part in (("q", q), ("k", k), ("v", v))},
        "layers.0.self_attn.o_proj.weight": np.asarray(params["layers.0.attention.out"]).T,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": np.asarray(params["layers.0.mlp.down"]).T,
    }
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: np.ascontiguousarray(np.asarray(x).astype(ml_dtypes.bfloat16)) for name, x in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "norm_before_residual": head.norm_before_residual,
        "dtype": "bfloat16",
        "transformer_layer_config": LAYER,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TINY_DRAFT)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write(arguments.out, *train(arguments.seed, arguments.steps))


if __name__ == "__main__":
    main()
