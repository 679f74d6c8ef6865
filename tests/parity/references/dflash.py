"""DFlash and DSpark drafters in float64 NumPy, after their published definitions. It knows nothing of jswa.

    z-lab/dflash, dflash/model.py; vLLM 0.33: models/qwen3_dflash.py, qwen3_dflash2.py, laguna_dflash.py,
    qwen3_dspark.py and gemma4_dspark.py, models/beam/nvidia/dflash2.py, and v1/worker/gpu/spec_decode/dflash and
    dflash2; speculators 0.9: models/dflash and models/dspark; deepseek-ai/DeepSpec: modeling/dspark/gemma4

Every layer sees the K and V of a context, which are made of the target's hidden states, and those of the block: the
last token of the text and mask tokens after it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = Mapping[str, Any]
Array = NDArray[np.float64]
_SLIDING = "sliding_attention"


def dflash_shapes(config: Config, target_width: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint, by the names that it has."""
    layers, own = layer_config(config), merged(config)
    d, taps, muse = layers["hidden_size"], len(tap_ids(config)), "MuseGlimmerAssistantModel" in config["architectures"]
    fused, after = ("encoder.fc", "encoder.output_norm_enc") if muse else ("fc", "hidden_norm")
    shapes = {f"{fused}.weight": (d, taps * target_width), f"{after}.weight": (d,), "norm.weight": (d,)}
    for index in range(layers["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    if _laguna(config):
        shapes |= {f"aux_hidden_norms.{i}.weight": (target_width,) for i in range(taps)}
    drafts = own.get("draft_vocab_size", vocab)
    if drafts != vocab or _gemma4(config):
        shapes |= {"embed_tokens.weight": (vocab, d), "lm_head.weight": (drafts, d)}
    if (rank := own.get("markov_rank", 0)) > 0:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (drafts, rank)}
        shapes |= {"confidence_head.proj.weight": (1, d), "confidence_head.proj.bias": (1,)}
    if (rank := own.get("selector_rank", 0)) > 0:
        shapes |= {f"candidate_selector.{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, d)
    return shapes


def _layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    layers, own, gemma = layer_config(config), merged(config), _gemma4(config)
    d, head, heads, keys = (
        layers[k] for k in ("hidden_size", _head_key(config), "num_attention_heads", _kv_key(config))
    )
    rows = {"q_proj": heads * head, "k_proj": keys * head}
    if not (gemma and layers["attention_k_eq_v"]):
        rows["v_proj"] = keys * head
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (d,) for name in norms}
    shapes |= {f"self_attn.{name}.weight": (n, d) for name, n in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (d, heads * head)}
    shapes |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    shapes |= {f"mlp.{name}_proj.weight": (layers["intermediate_size"], d) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (d, layers["intermediate_size"])
    if layers.get("attention_bias"):
        shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()} | {"self_attn.o_proj.bias": (d,)}
    if own.get("attention_sink_bias"):
        shapes["self_attn.attention_sink_bias"] = (heads,)
    if _laguna(config):
        shapes["self_attn.g_proj.weight"] = (heads, d)
    if gemma:
        shapes["layer_scalar"] = (1,)
    if (taps := own.get("conv_kernel_size", 0)) > 0:
        weights = 2 * taps * (d // own["conv_group_size"])
        for part in ("attention", "mlp"):
            shapes[f"{part}_conv.base_kernel"] = (2, taps, d)
            shapes[f"{part}_conv.kernel_projection.weight"] = (weights, d)
    return shapes


def merged(config: Config) -> Mapping[str, Any]:
    """Return the keys of a config; those of `dflash_config` first."""
    return {**config, **config.get("dflash_config", {})}


def layer_config(config: Config) -> Mapping[str, Any]:
    """Return the keys of the layers."""
    found: Mapping[str, Any] = config.get("transformer_layer_config", config)
    return found


def tap_ids(config: Config) -> list[int]:
    """Return the layers of the target before which the hidden states are read."""
    if "aux_hidden_state_layer_ids" in config:
        return list(config["aux_hidden_state_layer_ids"])
    return [layer + 1 for layer in merged(config)["target_layer_ids"]]


def _laguna(config: Config) -> bool:
    return "DFlashLagunaForCausalLM" in config["architectures"]


def _gemma4(config: Config) -> bool:
    return "Gemma4DSparkModel" in config["architectures"]


def _head_key(config: Config) -> str:
    return "global_head_dim" if _gemma4(config) else "head_dim"


def _kv_key(config: Config) -> str:
    tied = _gemma4(config) and config["attention_k_eq_v"]
    return "num_global_key_value_heads" if tied else "num_key_value_heads"


class DFlashReference:
    """A drafter after a text.

    Args:
        tensors: of its checkpoint.
        tokens: the text.
        hidden: by tap, the target's hidden states of all positions.
        embedding, head: the target's [V, M], as the drafter reads them.
        mask_vector: takes the place of the mask token's embedding.
    """

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, NDArray[Any]],
        tokens: NDArray[np.int32],
        hidden: Mapping[int, NDArray[Any]],
        embedding: NDArray[Any],
        head: NDArray[Any],
        mask_vector: NDArray[Any] | None = None,
    ) -> None:
        self.config, self.layers, self.tokens = config, layer_config(config), tokens
        self.w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", np.asarray(embedding, np.float64)).copy()
        self.head = self.w.get("lm_head.weight", np.asarray(head, np.float64))
        self.gemma = _gemma4(config)
        if self.gemma:
            self.embedding *= np.sqrt(self.layers["hidden_size"])
        self.mask = merged(config)["mask_token_id"]
        if mask_vector is not None:
            self.embedding[self.mask] = mask_vector
        fused = self._fused([np.asarray(hidden[tap], np.float64) for tap in tap_ids(config)])
        positions = np.arange(len(tokens))
        self.context = []
        for index in range(self.layers["num_hidden_layers"]):
            read = self._norm(f"layers.{index}.input_layernorm", fused) if _laguna(config) else fused
            self.context.append(self._keys_and_values(index, read, positions))

    def drafts(self, count: int) -> tuple[NDArray[np.int64], float]:
        """Return the tokens drafted behind each position, -1 in row 0, and the least lead of a best logit."""
        found, lead = np.full((len(self.tokens), count), -1), np.inf
        for n in range(1, len(self.tokens)):
            found[n], least = self._behind(n, count)
            lead = min(lead, least)
        return found, lead

    def _behind(self, n: int, count: int) -> tuple[list[int], float]:
        first = merged(self.config).get("sample_from_anchor", "markov_rank" in merged(self.config))
        block = np.array([self.tokens[n], *[self.mask] * (count - 1 if first else count)])
        x, positions = self.embedding[block], n + np.arange(len(block))
        x = x * merged(self.config).get("input_embedding_scale", 1.0)
        for index in range(self.layers["num_hidden_layers"]):
            x = self._layer(index, x, n, positions)
        hidden = self._norm("norm", x)[-count:]
        logits = hidden @ self.head.T
        if self.gemma:
            cap = self.layers["final_logit_softcapping"]
            logits = np.tanh(logits / cap) * cap
        drafted, lead = [int(self.tokens[n])], np.inf
        for row, state in zip(logits, hidden, strict=True):
            if "candidate_selector.hidden_projection.weight" in self.w:
                row = self._selected(row, state, drafted[-1])
            if "markov_head.markov_w1.weight" in self.w:
                before = self.w["markov_head.markov_w1.weight"][drafted[-1]]
                row = row + self.w["markov_head.markov_w2.weight"] @ before
            best = np.sort(row)[-2:]
            lead, token = min(lead, float(best[1] - best[0])), int(row.argmax())
            drafted.append(token + int(self.w["d2t"][token]) if "d2t" in self.w else token)
        return drafted[1:], lead

    def _selected(self, row: Array, state: Array, before: int) -> Array:
        """Return the logits of the likeliest tokens and what the token before adds to them; -inf for all others."""
        first, second, narrow = (
            self.w[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        ids = np.argsort(-row)[: merged(self.config)["selector_top_k"]]
        found = np.full_like(row, -np.inf)
        found[ids] = row[ids] + second[ids] @ (first[before] * (narrow @ state))
        return found

    def _summed(self, own: str, side: int, x: Array, read: Array) -> Array:
        """Return each place's sum of its own last places; the weights depend on what a part of the layer reads."""
        base, group = self.w[f"{own}.base_kernel"][side], merged(self.config)["conv_group_size"]
        computed = (read @ self.w[f"{own}.kernel_projection.weight"].T).reshape(len(x), 2, len(base), -1)[:, side]
        weights = base[None] + np.repeat(computed, group, axis=2)
        out = np.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(len(base), place + 1)):
                out[place] += weights[place, tap] * x[place - tap]
        return out

    def _second_layer(self, index: int, x: Array, n: int, positions: NDArray[np.int64]) -> Array:
        own = f"layers.{index}"
        read = self._norm(f"{own}.input_layernorm", x)
        attended = self._attended(index, self._summed(f"{own}.attention_conv", 0, read, read), n, positions)
        x = x + self._summed(f"{own}.attention_conv", 1, attended, read)
        read = self._norm(f"{own}.post_attention_layernorm", x)
        fed = self._mlp(index, self._summed(f"{own}.mlp_conv", 0, read, read))
        return x + self._summed(f"{own}.mlp_conv", 1, fed, read)

    def _layer(self, index: int, x: Array, n: int, positions: NDArray[np.int64]) -> Array:
        own = f"layers.{index}"
        if f"{own}.mlp_conv.base_kernel" in self.w:
            return self._second_layer(index, x, n, positions)
        attended = self._attended(index, self._norm(f"{own}.input_layernorm", x), n, positions)
        if self.gemma:
            x = x + self._norm(f"{own}.post_attention_layernorm", attended)
            fed = self._mlp(index, self._norm(f"{own}.pre_feedforward_layernorm", x))
            return (x + self._norm(f"{own}.post_feedforward_layernorm", fed)) * self.w[f"{own}.layer_scalar"]
        x = x + attended
        return x + self._mlp(index, self._norm(f"{own}.post_attention_layernorm", x))

    def _mlp(self, index: int, x: Array) -> Array:
        gate, up = (x @ self.w[f"layers.{index}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        if self.gemma:  # gelu_pytorch_tanh
            active = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            active = gate / (1 + np.exp(-gate))
        fed: Array = (active * up) @ self.w[f"layers.{index}.mlp.down_proj.weight"].T
        return fed

    def _fused(self, taps: Sequence[Array]) -> Array:
        if _laguna(self.config):
            taps = [self._norm(f"aux_hidden_norms.{i}", tap) for i, tap in enumerate(taps)]
        muse = "encoder.fc.weight" in self.w
        both = np.concatenate(taps, axis=1) @ self.w["encoder.fc.weight" if muse else "fc.weight"].T
        return self._norm("encoder.output_norm_enc" if muse else "hidden_norm", both)

    def _linear(self, index: int, name: str, x: Array) -> Array:
        own = f"layers.{index}.self_attn.{name}"
        return x @ self.w[f"{own}.weight"].T + self.w.get(f"{own}.bias", np.zeros(()))

    def _heads(self, index: int, name: str, x: Array, positions: NDArray[np.int64]) -> Array:
        heads = self._linear(index, f"{name}_proj", x).reshape(len(x), -1, self.layers[_head_key(self.config)])
        return self._turned(self._norm(f"layers.{index}.self_attn.{name}_norm", heads), positions)

    def _keys_and_values(self, index: int, x: Array, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        tied = self.gemma and self.layers["attention_k_eq_v"]
        values = self._linear(index, "k_proj" if tied else "v_proj", x)
        values = values.reshape(len(x), -1, self.layers[_head_key(self.config)])
        if self.gemma:
            values = values / self._root(values)
        return self._heads(index, "k", x, positions), values * merged(self.config).get("attention_value_scale", 1.0)

    def _attended(self, index: int, x: Array, n: int, positions: NDArray[np.int64]) -> Array:
        q = self._heads(index, "q", x, positions)
        own = self._keys_and_values(index, x, positions)
        k, v = (np.concatenate([old[:n], new]) for old, new in zip(self.context[index], own, strict=True))
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        at, window = np.arange(len(k)), self._window(index)
        seen = np.ones((len(x), len(k)), bool)
        if window is not None:
            seen &= at[None] > positions[:, None] - window
        if self._causal(index):
            seen &= at[None] <= positions[:, None]
        scores = np.einsum("qhd,khd->qhk", q, k) / (1 if self.gemma else np.sqrt(q.shape[2]))
        scores = np.where(seen[:, None], scores, -np.inf)
        sinks = self.w.get(f"layers.{index}.self_attn.attention_sink_bias")
        if sinks is not None:
            scores = np.concatenate([scores, np.broadcast_to(sinks[None, :, None], (*scores.shape[:2], 1))], axis=2)
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares = (shares / shares.sum(axis=2, keepdims=True))[..., : len(k)]
        out = np.einsum("qhk,khd->qhd", shares, v)
        if _laguna(self.config):
            out = out * np.log1p(np.exp(self._linear(index, "g_proj", x)))[..., None]
        return self._linear(index, "o_proj", out.reshape(len(x), -1))

    def _window(self, index: int) -> int | None:
        own, types = merged(self.config), self.layers.get("layer_types") or []
        sliding = _SLIDING in types
        size: int = own.get("swa_window_size", self.layers.get("sliding_window"))
        if not sliding:
            return size if own.get("use_swa") else None
        return size if types[index] == _SLIDING else None

    def _causal(self, index: int) -> bool:
        types = self.layers.get("layer_types") or []
        slides = bool(types) and types[index] == _SLIDING
        if "speculators_model_type" in self.config:
            second = self.config["speculators_model_type"] == "dflash2"
            return slides and not self.config.get("sliding_window_non_causal", second)
        muse = "MuseGlimmerAssistantModel" in self.config["architectures"]
        default = self.config.get("dflash_config", {}).get("causal", slides and not muse)
        return bool(self.config.get("is_causal", default))

    def _turned(self, x: Array, positions: NDArray[np.int64]) -> Array:
        if self.gemma:
            return self._turned_in_part(x, positions)
        size = int(x.shape[-1] * self.layers.get("partial_rotary_factor", 1.0))
        half = size // 2
        angles = positions[:, None] * self.layers["rope_theta"] ** -(np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, other, rest = x[..., :half], x[..., half:size], x[..., size:]
        return np.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)

    def _turned_in_part(self, x: Array, positions: NDArray[np.int64]) -> Array:
        """Turn the first pairs (i, i + D / 2), by the angles that they have in a head that turns as a whole."""
        rope, half = self.layers["rope_parameters"]["full_attention"], x.shape[-1] // 2
        angles = positions[:, None] * rope["rope_theta"] ** -(np.arange(half) / half)
        angles[:, int(half * rope["partial_rotary_factor"]) :] = 0
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, other = x[..., :half], x[..., half:]
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    def _norm(self, name: str, x: Array) -> Array:
        normed: Array = x / self._root(x) * self.w[f"{name}.weight"]
        return normed

    def _root(self, x: Array) -> Array:
        root: Array = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.layers["rms_norm_eps"])
        return root
