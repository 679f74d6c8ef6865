"""Float64 references, in NumPy, of families that transformers does not have. They know nothing of jswa.

plamo3      vLLM's vllm/model_executor/models/plamo3.py, SGLang's models/plamo3.py and configs/plamo3.py
spark2_5    modeling_spark.py and configuration_spark.py of XHToken/Spark-X2.5-4B
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Array = NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]
Shapes = dict[str, tuple[int, ...]]
_SLIDING = "sliding_attention"


def plamo3_shapes(config: Config) -> Shapes:
    """Return the shapes of the tensors of a checkpoint, by name."""
    d, f, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.layers.{index}"
        shapes |= {f"{layer}.{kind}_{part}_norm.weight": (d,) for kind in ("pre", "post") for part in ("mixer", "mlp")}
        shapes |= {f"{layer}.mixer.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{layer}.mixer.qkv_proj.weight"] = ((heads + 2 * keys) * head, d)
        shapes[f"{layer}.mixer.o_proj.weight"] = (d, heads * head)
        shapes[f"{layer}.mlp.gate_up_proj.weight"] = (2 * f, d)
        shapes[f"{layer}.mlp.down_proj.weight"] = (d, f)
    return shapes


def plamo3(config: Config, tensors: Weights, tokens: NDArray[np.int32]) -> Array:
    """Return the logits [T, V] of a text."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    eps, head, heads = config["rms_norm_eps"], config["head_dim"], config["num_attention_heads"]
    keys, n = config["num_key_value_heads"], len(tokens)
    x = w["model.embed_tokens.weight"][tokens]
    if config["scale_embedding"]:
        x = x * math.sqrt(config["hidden_size"])
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.layers.{index}"
        full = (index + 1) % config["sliding_window_pattern"] == 0

        def norm(name: str, x: Array, offset: float, layer: str = layer) -> Array:
            return _rms(x, offset + w[f"{layer}.{name}.weight"], eps)

        y = norm("pre_mixer_norm", x, 1.0) @ w[f"{layer}.mixer.qkv_proj.weight"].T
        q, k, v = np.split(y, [heads * head, (heads + keys) * head], axis=1)
        angles, scale = _plamo3_angles(config, full=full, positions=n)
        q = _rotated(norm("mixer.q_norm", q.reshape(n, heads, head), 1.0), angles, scale)
        k = _rotated(norm("mixer.k_norm", k.reshape(n, keys, head), 1.0), angles, scale)
        out = _attention(q, k, v.reshape(n, keys, head), None if full else config["window_size"])
        x = x + norm("post_mixer_norm", out.reshape(n, -1) @ w[f"{layer}.mixer.o_proj.weight"].T, 1 / 5)
        gate, up = np.split(norm("pre_mlp_norm", x, 1.0) @ w[f"{layer}.mlp.gate_up_proj.weight"].T, 2, axis=1)
        y = (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
        x = x + norm("post_mlp_norm", y, 1 / 5**1.5)
    x = _rms(x, 1 + w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def _plamo3_angles(config: Config, *, full: bool, positions: int) -> tuple[Array, float]:
    """Return angles [T, D / 2], and the factor of cosines and sines."""
    head = config["head_dim"]
    base = config["rope_theta" if full else "rope_local_theta"]
    inverse = base ** (-np.arange(0, head, 2) / head)
    factor = config["rope_scaling_factor"] if full else 1
    if factor == 1:
        return np.outer(np.arange(positions), inverse), 1.0
    original = config["initial_context_length"]

    def dimension(rotations: float) -> float:
        """Return the dimension whose wave turns so often in the original context (YaRN, arXiv 2309.00071)."""
        return float(head * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = max(dimension(32.0), 0.0), min(dimension(1.0), head - 1.0)
    stretched = np.clip((np.arange(head // 2) - low) / (high - low), 0, 1)
    inverse = inverse / factor * stretched + inverse * (1 - stretched)
    return np.outer(np.arange(positions), inverse), 0.1 * math.log(factor) + 1


def spark2_5_shapes(config: Config) -> Shapes:
    """Return the shapes of the tensors of a checkpoint, by name."""
    d, f, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: Shapes = {"model.embedding.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        shapes[f"{layer}.self_attn.q_k_v_proj.weight"] = ((heads + 2 * keys) * head, d)
        shapes[f"{layer}.self_attn.out_proj.weight"] = (d, heads * head)
        if config["headwise_attn_output_gate"]:
            shapes[f"{layer}.self_attn.g_proj.weight"] = (heads, d)
        sizes = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        shapes |= {f"{layer}.mlp.{name}.weight": size for name, size in sizes.items()}
        if config["mlp_bias"]:
            shapes |= {f"{layer}.mlp.{name}.bias": size[:1] for name, size in sizes.items()}
    return shapes


def spark2_5(config: Config, tensors: Weights, tokens: NDArray[np.int32]) -> Array:
    """Return the logits [T, V] of a text."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    eps, head, heads = config["rms_norm_eps"], config["head_dim"], config["num_attention_heads"]
    keys, n = config["num_key_value_heads"], len(tokens)
    x = w["model.embedding.weight"][tokens]
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        y = _rms(x, w[f"{layer}.input_layernorm.weight"], eps)
        qkv = y @ w[f"{layer}.self_attn.q_k_v_proj.weight"].T
        q, k, v = np.split(qkv, [heads * head, (heads + keys) * head], axis=1)
        rope = config["rope_parameters"].get(kind, {})
        turned = int(head * rope.get("partial_rotary_factor", 1.0))
        inverse = rope.get("rope_theta", 10000) ** (-np.arange(0, turned, 2) / turned)
        angles = np.outer(np.arange(n), inverse)
        q, k = (_rotated(z.reshape(n, -1, head), angles) for z in (q, k))
        out = _attention(q, k, v.reshape(n, keys, head), config["sliding_window"] if kind == _SLIDING else None)
        if config["headwise_attn_output_gate"]:
            out = out / (1 + np.exp(-(y @ w[f"{layer}.self_attn.g_proj.weight"].T)))[..., None]
        x = x + out.reshape(n, -1) @ w[f"{layer}.self_attn.out_proj.weight"].T

        def linear(name: str, x: Array, layer: str = layer) -> Array:
            return x @ w[f"{layer}.mlp.{name}.weight"].T + w.get(f"{layer}.mlp.{name}.bias", np.zeros(()))

        y = _rms(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        x = x + linear("down_proj", _gelu(linear("gate_proj", y)) * linear("up_proj", y))
    x = _rms(x, w["model.norm.weight"], eps)
    return x @ w["model.embedding.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _gelu(x: Array) -> Array:
    """Return the exact GELU, not its approximation by tanh."""
    erf: Callable[[Array], Array] = np.vectorize(math.erf)
    return x / 2 * (1 + erf(x / math.sqrt(2)))


def _rotated(x: Array, angles: Array, scale: float = 1.0) -> Array:
    """Return heads [T, N, D] whose first 2n dimensions are rotated in pairs (i, i + n), angles being [T, n]."""
    n = angles.shape[1]
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = scale * np.cos(angles)[:, None], scale * np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """Return the attention output [T, H, D]; with a window, a query sees that many keys, with its own."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / math.sqrt(q.shape[-1])
    back = np.arange(len(q))[:, None] - np.arange(len(q))
    scores[:, (back < 0) | (back >= (window or len(q)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = np.einsum(
        "hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), np.repeat(v, group, axis=1)
    )
    return result
