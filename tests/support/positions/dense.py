"""A dense decoder in NumPy, by the config.json and the tensors of a checkpoint; imports nothing of the engine.

It knows Mistral, Olmo 3, Gemma 3, gpt-oss and Llama 4 as transformers has them (test_dense.py), and attends in blocks
of queries, so that long texts fit into memory. Angles are products of float32, as everywhere: those are tested by
test_rotary.py, and in exact ones logits at 20k tokens would differ by a hundred times the noise of the rest.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tests.support.positions.rotary import Frequencies, default, llama3, temperature, yarn

BLOCK = 256  # queries
Config = dict[str, Any]
Tensors = dict[str, Any]
Array = Float[np.ndarray, "..."]


def log_probs(
    config: Config, tensors: Tensors, tokens: Int[np.ndarray, " T"], *, extra_keys: int = 0
) -> Float[np.ndarray, "T V"]:
    """Return log probabilities of the token after each position.

    `extra_keys`: that many keys more than the window has, or fewer: shows what a wrong window would change.
    """
    out = logits(config, tensors, tokens, extra_keys=extra_keys).astype(np.float64)
    out -= out.max(axis=-1, keepdims=True)
    return np.asarray(out - np.log(np.exp(out).sum(axis=-1, keepdims=True)))


def logits(
    config: Config, tensors: Tensors, tokens: Int[np.ndarray, " T"], *, extra_keys: int = 0
) -> Float[np.ndarray, "T V"]:
    """Return float32 logits of all positions."""
    embed = tensors["model.embed_tokens.weight"]
    gemma = config["model_type"] == "gemma3_text"
    x = embed[tokens] * np.float32(math.sqrt(embed.shape[1]) if gemma else 1)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        read = _norm(config, layer["input_layernorm.weight"], x) if "input_layernorm.weight" in layer else x
        attended, after = _attend(config, layer, index, read, extra_keys), "post_attention_layernorm.weight"
        if "post_feedforward_layernorm.weight" in layer:  # norms behind attention and feed-forward
            x = x + _norm(config, layer[after], attended)
            before = layer.get("pre_feedforward_layernorm.weight")
            fed = _feed(config, layer, x if before is None else _norm(config, before, x))
            x = x + _norm(config, layer["post_feedforward_layernorm.weight"], fed)
        else:
            x = x + attended
            x = x + _feed(config, layer, _norm(config, layer[after], x))
    head = embed if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    return np.asarray(_norm(config, tensors["model.norm.weight"], x) @ head.T)


def _norm(config: Config, weight: Array | float, x: Array) -> Array:
    shift = config["model_type"] == "gemma3_text"
    rms = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(config["rms_norm_eps"]))
    return np.asarray(x / rms * (weight + np.float32(shift)), np.float32)


def _attend(config: Config, layer: Tensors, index: int, x: Array, extra_keys: int) -> Array:
    kind = config.get("layer_types", ["sliding_attention"] * (index + 1))[index]
    heads, size = config["num_attention_heads"], config.get("head_dim") or len(x[0]) // config["num_attention_heads"]
    q, k, v = (_heads(config, layer, name, x, size) for name in "qkv")
    positions = np.arange(len(x))
    llama4 = config["model_type"] == "llama4_text"
    if llama4 and not config["no_rope_layers"][index]:
        factor = temperature(positions, config["floor_scale"], config["attn_scale"])
        q = q * factor.astype(np.float32)[:, None, None]
    else:
        rope = _frequencies(config, kind, size)
        q, k = (_turned(rope, part, neighbours=llama4) for part in (q, k))
        if llama4 and config["use_qk_norm"]:
            q, k = (_norm(config, 1.0, part) for part in (q, k))
    scale = np.float32(float(config.get("query_pre_attn_scalar") or size) ** -0.5)
    group = heads // k.shape[1]
    queries = q.reshape(len(x), k.shape[1], group, size).transpose(1, 2, 0, 3) * scale  # K, G, T, D
    keys, values = k.transpose(1, 2, 0)[:, None], v.transpose(1, 0, 2)[:, None]
    sinks = layer.get("self_attn.sinks")
    out = np.empty((len(x), heads, size), np.float32)
    for start in range(0, len(x), BLOCK):
        rows = positions[start : start + BLOCK]
        first = _first_keys(config, kind, rows, extra_keys)
        low, end = int(first.min()), int(rows[-1]) + 1
        seen = (positions[low:end] >= first[:, None]) & (positions[low:end] <= rows[:, None])
        scores = np.where(seen, queries[:, :, rows] @ keys[..., low:end], np.float32(-np.inf))
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks.reshape(-1, group, 1, 1))
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(-1, group, 1, 1) - top)
        out[rows] = ((weights @ values[:, :, low:end]) / total).transpose(2, 0, 1, 3).reshape(len(rows), heads, size)
    return _linear(layer, "self_attn.o_proj", out.reshape(len(x), -1))


def _first_keys(config: Config, kind: str, rows: Int[np.ndarray, " B"], extra_keys: int) -> Int[np.ndarray, " B"]:
    """Return the oldest key that each query sees: with a window W the last W keys, its own included."""
    if kind == "full_attention":
        return np.zeros_like(rows)
    if kind == "chunked_attention":
        chunk = config["attention_chunk_size"]
        return np.asarray(np.clip(rows // chunk * chunk - extra_keys, 0, rows))
    return np.asarray(np.maximum(rows - config["sliding_window"] + 1 - extra_keys, 0))


def _heads(config: Config, layer: Tensors, name: str, x: Array, size: int) -> Array:
    out, weight = _linear(layer, f"self_attn.{name}_proj", x), layer.get(f"self_attn.{name}_norm.weight")
    if weight is not None and len(weight) != size:  # over all heads
        out = _norm(config, weight, out)
    out = out.reshape(len(x), -1, size)
    return _norm(config, weight, out) if weight is not None and len(weight) == size else out


def _frequencies(config: Config, kind: str, size: int) -> Frequencies:
    rope = config["rope_parameters"]
    flat = "rope_theta" in rope
    rope = rope if flat else rope[kind]
    base, original = rope["rope_theta"], rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "yarn":
        whole, scale = not flat or rope.get("truncate", True), rope.get("attention_factor")
        return yarn(base, size, rope["factor"], original, whole=whole, scale=scale)
    if rope["rope_type"] == "llama3":
        return llama3(base, size, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    assert rope["rope_type"] == "default", rope
    return default(base, size)


def _turned(rope: Frequencies, x: Array, *, neighbours: bool) -> Array:
    angle = np.arange(len(x), dtype=np.float32)[:, None, None] * rope.inverse.astype(np.float32)
    cos, sin = ((f(angle.astype(np.float64)) * rope.scale).astype(np.float32) for f in (np.cos, np.sin))
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    turned = (first * cos - second * sin, second * cos + first * sin)
    return np.stack(turned, axis=-1).reshape(x.shape) if neighbours else np.concatenate(turned, axis=-1)


def _linear(layer: Tensors, name: str, x: Array) -> Array:
    return np.asarray(x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", np.float32(0)))


def _feed(config: Config, layer: Tensors, x: Array) -> Array:
    if "mlp.router.weight" in layer:
        return _gpt_oss_experts(config, layer, x)
    if "feed_forward.router.weight" in layer:
        shared = _gated(config, layer, "feed_forward.shared_expert", x)
        return np.asarray(_llama4_experts(config, layer, x) + shared)
    return _gated(config, layer, "feed_forward" if "feed_forward.gate_proj.weight" in layer else "mlp", x)


def _gated(config: Config, layer: Tensors, name: str, x: Array) -> Array:
    gate = _linear(layer, f"{name}.gate_proj", x)
    if "hidden_activation" in config:
        gate = 0.5 * gate * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)))
    else:
        gate = gate * _sigmoid(gate)
    return _linear(layer, f"{name}.down_proj", gate * _linear(layer, f"{name}.up_proj", x))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gpt_oss_experts(config: Config, layer: Tensors, x: Array) -> Array:
    """Return the sum of all experts by the softmax of the router: none is left out, so no choice can be close."""
    scores, limit = _linear(layer, "mlp.router", x), np.float32(config["swiglu_limit"])
    assert config["num_experts_per_tok"] == config["num_local_experts"]
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share, out = scores / scores.sum(axis=-1, keepdims=True), np.zeros_like(x)
    tensors = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    for expert, (inner, inner_bias, down, bias) in enumerate(
        zip(*(layer[f"mlp.experts.{n}"] for n in tensors), strict=True)
    ):
        wide = x @ inner + inner_bias
        gate, up = np.minimum(wide[:, ::2], limit), np.clip(wide[:, 1::2], -limit, limit)
        hidden = (up + 1) * gate * _sigmoid(gate * np.float32(config["swiglu_alpha"]))
        out += share[:, expert, None] * (hidden @ down + bias)
    return out


def _llama4_experts(config: Config, layer: Tensors, x: Array) -> Array:
    """Return the sum of all experts, whose input is weighted."""
    assert config["num_experts_per_tok"] == config["num_local_experts"]
    weights, out = _sigmoid(_linear(layer, "feed_forward.router", x)), np.zeros_like(x)
    names = ("gate_up_proj", "down_proj")
    for expert, (inner, down) in enumerate(
        zip(*(layer[f"feed_forward.experts.{name}"] for name in names), strict=True)
    ):
        gate, up = np.split((x * weights[:, expert, None]) @ inner, 2, axis=-1)
        out += (gate * _sigmoid(gate) * up) @ down
    return out
