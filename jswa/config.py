"""What a model is (`ModelConfig`), what the user asks for (`EngineConfig`), what the engine runs with (`Limits`).

All are frozen and hashable, so that they can be static arguments of a jitted function. No jax here.
Units: every length, window and position is in tokens; a window counts the query token itself.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from jswa.errors import ConfigError

AttentionKind = Literal["full", "local"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm: x / rms(x) · (offset + weight), computed in float32.

    Gemma stores the weight minus one (offset 1). `cast_first` rounds x / rms(x) to the activation type before the
    weight is applied (llama) instead of after (gemma); float32 does not see it. `weighted` False: no weight at all.
    """

    eps: float
    offset: float = 0.0
    cast_first: bool = True
    weighted: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2n dimensions, n = len(inv_freq); those from 2n on pass through.

    Pairs are (i, i + n) (half or NeoX style), or (2i, 2i + 1) where `interleaved` (GPT-J style).
    angle = position · inv_freq; cos and sin are multiplied by `scale`.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class Reach:
    """Which keys a local layer's query at position q sees: sliding, k > q - size, or chunked, k ≥ ⌊q / size⌋ · size.

    `size` counts the query itself: keys seen at most.
    """

    size: int
    chunked: bool = False

    def first_visible(self, position: int) -> int:
        """Oldest position that a query at `position` sees, and so the oldest that any later query sees."""
        return position // self.size * self.size if self.chunked else max(0, position - (self.size - 1))

    def leaves_at(self, position: int) -> int:
        """First query position that no longer sees `position`."""
        return (position // self.size + 1) * self.size if self.chunked else position + self.size


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their position: q · (1 + scale · ln(1 + ⌊(position + 1) / floor⌋)) (Llama 4)."""

    floor: float
    scale: float


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer; `reach` is None for a full layer.

    Attributes:
        qk_norm: per head, on q and k.
        sinks: a learned logit per query head joins the softmax and takes its share of the weights.
        v_scale: values are multiplied by it before they are stored.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rope: Rope | None
    reach: Reach | None = None
    qk_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False
    v_scale: float = 1.0
    temperature: Temperature | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def kind(self) -> AttentionKind:
        """Which page view of the arena the layer reads: `local` layers hold what their reach needs."""
        return "full" if self.reach is None else "local"


@dataclass(frozen=True)
class MlpConfig:
    """Gated feed-forward: down(act(gate(x)) · up(x))."""

    hidden: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and weighed; logits = x · w + bias, ties go to the lowest index.

    Attributes:
        score: what is ranked and weighs: "softmax" over all experts, or "sigmoid"; or logits are ranked, and the
            chosen ones weigh by their "top_k_softmax" or "top_k_sigmoid".
        selection_bias: a learned bias joins the scores for the choice, never the weights.
        normalize: weights are divided by their sum + `eps`.
        groups, top_groups: experts are chosen within the best groups, a group's merit being its two best scores.
        scale: factor of the weights.
    """

    score: Literal["softmax", "sigmoid", "top_k_softmax", "top_k_sigmoid"]
    bias: bool = False
    selection_bias: bool = False
    normalize: bool = False
    eps: float = 0.0
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts, each an MLP of width `hidden`; `shared` is one that every token passes.

    Attributes:
        bias: experts have biases.
        clamp: gpt-oss's activation: gate ≤ clamp, |up| ≤ clamp, (up + 1) · gate · σ(alpha · gate).
        weight_on_input: the weight multiplies the expert's input instead of its output (Llama 4).
    """

    num_experts: int
    top_k: int
    hidden: int
    activation: Activation
    router: RouterConfig
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    weight_on_input: bool = False
    shared: MlpConfig | None = None


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: x + post_attn(attn(pre_attn(x))), then x + post_mlp(mlp(pre_mlp(x))). None = no norm."""

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    pre_attn: Norm | None
    post_attn: Norm | None
    pre_mlp: Norm | None
    post_mlp: Norm | None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, derived from a checkpoint's config.json. `layers` says everything that differs by layer."""

    family: str
    vocab_size: int
    d_model: int
    max_position: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm
    tie_embeddings: bool
    embed_scale: float = 1.0
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine, with vLLM's names where vLLM has the option. None means: chosen at start.

    Attributes:
        dtype: of weights, activations and KV: auto (float32 on CPU, bfloat16 on GPU), float32, bfloat16, float16.
        max_model_len: longest prompt + generated text of one request, in tokens.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of one step, prefill chunks and decode rows together.
        block_size: tokens per KV page (16 on CPU, 64 on GPU).
        gpu_memory_utilization: share of the device's memory for weights, scratch and KV.
        kv_cache_memory_bytes: bytes for the KV arena, in place of that share.
        seed: of the requests that bring none.
        prefix_cache: reuse the KV of shared prefixes.
        prefix_cache_interval: keep what a request needs to resume at every so many tokens of a prompt too, not only
            where prompts and texts end and where texts part. Costs a window of local KV each, while memory lasts.
        load_format: auto (safetensors), or dummy: random weights from the config's shapes, no weight file is read.
        deterministic: run every step in one shape, so that a request's tokens do not depend on what else runs; slow.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    seed: int = 0
    prefix_cache: bool = True
    prefix_cache_interval: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "kv_cache_memory_bytes",
            "prefix_cache_interval",
        ):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(name, value, "must be a whole number of at least 1")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", 1, "must leave room for a prompt and a generated token: at least 2")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError("dtype", self.dtype, "must be auto, float32, bfloat16 or float16")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError("load_format", self.load_format, "must be auto or dummy")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must be a whole number in [0, 2^63)")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError("prefix_cache", self.prefix_cache, "must be True or False")


@dataclass(frozen=True)
class Limits:
    """What the engine runs with, all chosen. Made by `resolve_limits`; sizes the arena, the tables and the buckets."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    page_size: int
    num_blocks: int = field(default=0)
    one_bucket: bool = False
    prefix_cache: bool = True
    prefix_cache_interval: int | None = None

    @property
    def extras_places(self) -> int:
        """Rows that may have penalties, biases or masks at the same time."""
        return min(self.max_rows, 32)

    @property
    def pages_per_row(self) -> int:
        """Width of a page table: pages that hold max_model_len tokens."""
        return math.ceil(self.max_model_len / self.page_size)


def resolve_limits(options: EngineConfig, model: ModelConfig, *, on_gpu: bool) -> Limits:
    """Fill in the options that were left open; the arena's size comes later, when the weights are on the device.

    Raises ConfigError where options contradict each other or the model.
    """
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError("max_model_len", max_model_len, f"the model was made for at most {model.max_position} tokens")
    if max_model_len < 2:
        raise ConfigError("max_model_len", max_model_len, "must be at least 2 (a prompt token and a generated one)")
    max_rows = options.max_num_seqs or (256 if on_gpu else 16)
    max_tokens = options.max_num_batched_tokens or max(max_rows, min(2048 if on_gpu else 512, max_model_len))
    if max_tokens < max_rows:
        raise ConfigError("max_num_batched_tokens", max_tokens, f"must be at least max_num_seqs = {max_rows}")
    page_size = options.block_size or (64 if on_gpu else 16)
    return Limits(
        max_model_len,
        max_rows,
        max_tokens,
        page_size,
        one_bucket=options.deterministic,
        prefix_cache=options.prefix_cache,
        prefix_cache_interval=options.prefix_cache_interval,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
