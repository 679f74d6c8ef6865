"""The layers for multi-token prediction of MiMo-V2 in float64 NumPy, after their definition, and their tensors.

Layer j pairs token q with the target's hidden state of position q - 1 - j, in front of the final norm. It is a decoder
layer with a window and a sink per head; the target's head reads its normed output.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tests.parity.weights import Tensor, random_weights

Wide = Any  # arrays of float64


def mtp_tensors(config: Mapping[str, Any], layers: int, seed: int) -> dict[str, Tensor]:
    """Return random tensors of layers for multi-token prediction, with the shapes of a local layer of the config."""
    d, width, heads, size = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim"))
    groups, values = 2 * config["num_key_value_heads"], config["v_head_dim"]
    each = {
        **{f"{name}.weight": (d,) for name in ("enorm", "hnorm", "final_layernorm")},
        **{f"{name}.weight": (d,) for name in ("input_layernorm", "pre_mlp_layernorm")},
        "eh_proj.weight": (d, 2 * d),
        "self_attn.q_proj.weight": (heads * size, d),
        "self_attn.k_proj.weight": (groups * size, d),
        "self_attn.v_proj.weight": (groups * values, d),
        "self_attn.o_proj.weight": (d, heads * values),
        "self_attn.attention_sink_bias": (heads,),
        **{f"mlp.{name}_proj.weight": (width, d) for name in ("gate", "up")},
        "mlp.down_proj.weight": (d, width),
    }
    shapes = {f"model.mtp.layers.{j}.{name}": shape for j in range(layers) for name, shape in each.items()}
    return random_weights(shapes, {name: 1.0 for name in shapes if "norm" in name}, seed)


class MtpReference:
    """Layers for multi-token prediction behind a text.

    Args:
        hidden: the target's hidden states of all positions.
        broken: positions before which the target ran nothing: hidden states before one count as zeros from it on.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        tokens: Int[np.ndarray, " T"],
        hidden: Float[np.ndarray, "T M"],
        broken: tuple[int, ...] = (),
    ) -> None:
        self.config, self.tokens, self.broken = config, tokens, broken
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.hidden = np.asarray(hidden, np.float64)
        self.layers = len({name.split(".")[3] for name in tensors if name.startswith("model.mtp.layers.")})

    def drafts(self) -> tuple[Int[np.ndarray, "T K"], float]:
        """Return the tokens drafted behind each position, -1 in row 0, and the least lead of a best logit."""
        found, lead = np.full((len(self.tokens), self.layers), -1), np.inf
        for n in range(1, len(self.tokens)):
            tokens = list(self.tokens[: n + 1])
            for j in range(self.layers):
                logits = self._logits(j, n, tokens)
                order = np.sort(logits)
                lead = min(lead, order[-1] - order[-2])
                found[n, j] = logits.argmax()
                tokens.append(int(found[n, j]))
        return found, float(lead)

    def _state(self, j: int, n: int, q: int) -> Wide:
        """Return the hidden state that layer j reads at position q, when the target has run the positions before n."""
        at = q - 1 - j
        unknown = any(at < begin <= min(q, n - 1) for begin in self.broken) or at < 0
        return np.zeros(self.hidden.shape[1]) if unknown else self.hidden[at]

    def _logits(self, j: int, n: int, tokens: list[int]) -> Wide:
        config, last = self.config, len(tokens) - 1
        first = max(j + 1, last - config["sliding_window_size"])
        rows = [self._input(j, tokens[q], self._state(j, n, q)) for q in range(first, last + 1)]
        x = np.stack(rows)
        read = self._norm(j, "input_layernorm", x)
        x = x[-1] + self._attended(j, read, np.arange(first, last + 1))
        read = self._norm(j, "pre_mlp_layernorm", x)
        gate, up = (self._of(j, f"mlp.{name}_proj.weight") @ read for name in ("gate", "up"))
        x = x + self._of(j, "mlp.down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        return head @ self._norm(j, "final_layernorm", x)

    def _input(self, j: int, token: int, hidden: Wide) -> Wide:
        embedded = self.tensors["model.embed_tokens.weight"][token]
        both = np.concatenate([self._norm(j, "enorm", embedded), self._norm(j, "hnorm", hidden)])
        return self._of(j, "eh_proj.weight") @ both

    def _attended(self, j: int, read: Wide, positions: Int[np.ndarray, " S"]) -> Wide:
        """Return attention of the last of the positions to all of them, projected."""
        config = self.config
        size, wide, heads = config["head_dim"], config["v_head_dim"], config["num_attention_heads"]
        q = self._turned((self._of(j, "self_attn.q_proj.weight") @ read[-1]).reshape(1, heads, size), positions[-1:])
        k = self._turned((read @ self._of(j, "self_attn.k_proj.weight").T).reshape(len(read), -1, size), positions)
        v = (read @ self._of(j, "self_attn.v_proj.weight").T).reshape(len(read), -1, wide)
        v = v * (config.get("attention_value_scale") or 1.0)
        k, v = (np.repeat(part, heads // part.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("hd,shd->hs", q[0], k) / np.sqrt(size)
        scores = np.concatenate([scores, self._of(j, "self_attn.attention_sink_bias")[:, None]], axis=1)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = (shares / shares.sum(axis=1, keepdims=True))[:, :-1]
        return self._of(j, "self_attn.o_proj.weight") @ np.einsum("hs,shd->hd", shares, v).reshape(-1)

    def _turned(self, x: Wide, positions: Int[np.ndarray, " S"]) -> Wide:
        rope = self.config["rope_parameters"]["sliding_attention"]
        turned = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = turned // 2
        angles = positions[:, None] * rope["rope_theta"] ** -(np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, other, rest = x[..., :half], x[..., half:turned], x[..., turned:]
        return np.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)

    def _norm(self, j: int, name: str, x: Wide) -> Wide:
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self._of(j, f"{name}.weight")

    def _of(self, j: int, name: str) -> Wide:
        return self.tensors[f"model.mtp.layers.{j}.{name}"]
