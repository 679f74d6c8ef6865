# mypy: disable-error-code="import-not-found,misc,no-any-return"
"""A reference of IQuest-Q1 in torch, of whole texts, written from the facts of SGLang 0.5.23.

The sink is computed as it is defined: one more key in each softmax, whose value is zero. Tensor names are those of the
checkpoint. `AutoModelForCausalLM` finds the class once this module has been imported.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class IQuestQ1Config(PretrainedConfig):
    """Keeps the keys that it is given."""

    model_type = "iquest_q1"


class Weighted(nn.Module):
    """An RMS norm that computes in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x."""
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    """Attention of one text to itself, with a key that is no token's."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        d, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.size, sliding = config.head_dim, config.kinds[index] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.theta = config.swa_rope_theta if sliding else config.rope_theta
        self.rotated = 0 if index in config.no_rope_layers else config.rotary_dim
        self.scale = config.softmax_scale or self.size**-0.5
        self.q_proj = nn.Linear(d, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, d, bias=False)
        self.q_norm, self.k_norm = (Weighted(self.size, config.rms_norm_eps) for _ in range(2))
        self.sink_k = nn.Parameter(torch.zeros(self.kv_heads, self.size)) if config.enable_sink_attention else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token; x [T, M]."""
        q, k, v = (part(x).reshape(len(x), -1, self.size) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self._turned(self.q_norm(q)), self._turned(self.k_norm(k))
        group = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * self.scale
        position = torch.arange(len(x))
        ago = position[:, None] - position[None]
        seen = (ago >= 0) & (ago < (self.window or len(x)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sink_k is not None:
            sink = self.sink_k.repeat_interleave(group, dim=0)
            own = torch.einsum("thd,hd->ht", q, sink) * self.scale
            scores = torch.cat([scores, own[..., None]], dim=-1)
        weights = scores.softmax(-1)[..., : len(x)]
        return self.o_proj(torch.einsum("hts,shd->thd", weights, v).reshape(len(x), -1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.rotated // 2
        if not half:
            return x
        angle = torch.arange(len(x))[:, None] * self.theta ** -(torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


class Experts(nn.Module):
    """Stacked experts: rows of gates, then of ups."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        count, inner, d = config.num_experts, config.intermediate_size, config.hidden_size
        self.fc = nn.Parameter(torch.zeros(count, 2 * inner, d))
        self.proj = nn.Parameter(torch.zeros(count, d, inner))


class Sparse(nn.Module):
    """The chosen experts of each token, weighted by the softmax of their logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts, self.chosen = Experts(config), config.num_experts_per_tok

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs."""
        logits, chosen = torch.topk(self.router(x), self.chosen, dim=-1)
        out = torch.zeros_like(x)
        for weight, expert in zip(logits.softmax(-1).T, chosen.T, strict=True):
            gate, up = torch.einsum("tfd,td->tf", self.experts.fc[expert], x).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * up
            out = out + weight[:, None] * torch.einsum("tdf,tf->td", self.experts.proj[expert], inner)
        return out


class Dense(nn.Module):
    """A gated feed-forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.dense_intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(d, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer. The first has another residual stream than the others."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        d, eps, self.first = config.hidden_size, config.rms_norm_eps, index == 0
        self.attention_norm, self.attn_out_norm, self.feed_forward_norm = (Weighted(d, eps) for _ in range(3))
        if self.first:
            self.ffn_out_norm = Weighted(d, eps)
        self.self_attn = Attention(config, index)
        self.mlp = Dense(config) if index in config.mlp_only_layers else Sparse(config)
        self.scales = (config.attn_out_scale, config.ffn_out_scale)
        if self.first:
            self.scales = (config.first_layer_attn_out_scale, config.first_layer_ffn_out_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer."""
        read = self.attention_norm(x)
        kept = x if self.first else read
        x = kept + self.attn_out_norm(self.self_attn(read)) * self.scales[0]
        out = self.mlp(self.feed_forward_norm(x))
        return x + (self.ffn_out_norm(out) if self.first else out) * self.scales[1]


class Stack(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        config.kinds = [
            *config.first_layers_types,
            *config.hybrid_layers_types_block * config.num_hybrid_layers_block,
            *config.last_layers_types,
        ]
        self.layers = nn.ModuleList([Block(config, index) for index in range(config.num_hidden_layers)])
        del config.kinds
        self.norm = Weighted(config.hidden_size, config.rms_norm_eps)


class IQuestQ1ForCausalLM(PreTrainedModel):
    """The whole model."""

    config_class = IQuestQ1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.scale = Stack(config), config.logit_scale
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights: make_fixtures draws its own."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embed_tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Return the logits of one whole text [1, T]."""
        x = self.model.embed_tokens(input_ids[0])
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x))[None] * self.scale)


AutoConfig.register("iquest_q1", IQuestQ1Config)
AutoModelForCausalLM.register(IQuestQ1Config, IQuestQ1ForCausalLM)
