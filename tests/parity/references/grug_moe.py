# mypy: disable-error-code="import-not-found,misc,no-any-return"
"""A reference of Grug MoE (schema 1) in torch, of whole texts, written from the facts of Marin's Levanter (Snowball).

Tensor names are those of its exports. `AutoModelForCausalLM` finds the class once this module has been imported.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.parity.references.iquest_q1 import Weighted

RANK = 128


class GrugConfig(PretrainedConfig):
    """Keeps the keys that it is given."""

    model_type = "grug_moe"


class Gated(nn.Module):
    """Numbers times a gate that a low-rank network computes of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down_proj, self.up_proj = nn.Linear(size, RANK, bias=False), nn.Linear(RANK, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gated x."""
        return x * torch.sigmoid(self.up_proj(nn.functional.silu(self.down_proj(x))))


class Attention(nn.Module):
    """Attention of one text to itself, without what a head says of its own value."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        d, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.size, self.scale, self.theta = config.head_dim, config.qk_mult * config.head_dim**-0.5, config.rope_theta
        full = index % 4 == 3 or index == config.num_hidden_layers - 1
        self.window = None if full else config.sliding_window
        self.q_proj = nn.Linear(d, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, d, bias=False)
        self.attn_gate = nn.Linear(d, self.heads, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token; x [T, M]."""
        q, k, v = (part(x).reshape(len(x), -1, self.size) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (part * torch.rsqrt((part * part).mean(-1, keepdim=True) + 1e-6) for part in (q, k))
        if self.window is not None:
            q, k = self._turned(q), self._turned(k)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        position = torch.arange(len(x))
        ago = position[:, None] - position[None]
        seen = (ago >= 0) & (ago < (self.window or len(x)))
        scores = (torch.einsum("thd,shd->hts", q, k) * self.scale).masked_fill(~seen, -torch.inf)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        along = (out * v).sum(-1, keepdim=True) / ((v * v).sum(-1, keepdim=True) + 1e-6)
        out = (out - along * v) * (2 * torch.sigmoid(self.attn_gate(x)))[..., None]
        return self.o_proj(out.reshape(len(x), -1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.size // 4
        angle = torch.arange(len(x))[:, None] * self.theta ** -(torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


class Bank(nn.Module):
    """One matrix of all experts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


class Experts(nn.Module):
    """The matrices of all experts."""

    def __init__(self, count: int, d: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            Bank(count, inner, d),
            Bank(count, inner, d),
            Bank(count, d, inner),
        )


class Sparse(nn.Module):
    """The chosen experts of each token. The bias of the router only takes part in the choice."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        count, self.chosen = config.num_experts, config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, count)
        self.experts = Experts(count, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs."""
        logits = x @ self.router.weight.T
        _, chosen = torch.topk(logits + self.router.bias, self.chosen, dim=-1)
        weights = torch.sigmoid(logits.gather(-1, chosen))
        weights = weights * (2.5 / (weights.sum(-1, keepdim=True) + 1e-9))
        out = torch.zeros_like(x)
        for weight, expert in zip(weights.T, chosen.T, strict=True):
            gate, up = (
                torch.einsum("tfd,td->tf", bank.weight[expert], x)
                for bank in (self.experts.gate_proj, self.experts.up_proj)
            )
            inner = nn.functional.silu(gate) * up
            out = out + weight[:, None] * torch.einsum("tdf,tf->td", self.experts.down_proj.weight[expert], inner)
        return out


class Shared(nn.Module):
    """The expert of all tokens."""

    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(d, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Weighted(d, eps), Weighted(d, eps)
        self.attn_gated_norm, self.mlp_gated_norm = Gated(d), Gated(d)
        self.self_attn, self.mlp = Attention(config, index), Sparse(config)
        self.shared_expert = Shared(d, config.shared_expert_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer."""
        x = x + self.self_attn(self.attn_gated_norm(self.input_layernorm(x)))
        read = self.mlp_gated_norm(self.post_attention_layernorm(x))
        return x + self.mlp(read) + self.shared_expert(read)


class Stack(nn.Module):
    """Embedding and layers, with the norms of both ends."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.embed_norm, self.norm = Weighted(d, eps), Weighted(d, eps)
        self.embed_gated_norm, self.final_gated_norm = Gated(d), Gated(d)
        self.layers = nn.ModuleList([Block(config, index) for index in range(config.num_hidden_layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state of each token."""
        x = self.embed_gated_norm(self.embed_norm(self.embed_tokens(ids)))
        for layer in self.layers:
            x = layer(x)
        return self.final_gated_norm(self.norm(x))


class GrugMoeForCausalLM(PreTrainedModel):
    """The whole model."""

    config_class = GrugConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights: make_fixtures draws its own."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embed_tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Return the logits of one whole text [1, T]."""
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids[0]))[None])


AutoConfig.register("grug_moe", GrugConfig)
AutoModelForCausalLM.register(GrugConfig, GrugMoeForCausalLM)
