"""What the user asks for (`EngineConfig`) and what the engine runs with (`Limits`). No jax here; lengths in tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from jswa.architecture import ModelConfig
from jswa.errors import ConfigError

_MAX_ADAPTERS = 64  # every step multiplies by the low-rank matrices of all adapters
_MAX_ADAPTER_NAME = 128  # characters


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine, with vLLM's names where vLLM has the option. None means: chosen at start.

    Attributes:
        dtype: of weights, activations and KV: auto (float32 on CPU, bfloat16 on GPU), float32, bfloat16, float16.
        kv_cache_dtype: of the KV alone: auto (as dtype), or fp8 (e4m3, half or a quarter of the bytes; K and V beyond
            ±448 times their scale, 1 unless the checkpoint has one, are cut).
        quantization: of linear layers and experts: auto (8 bits with a scale per output, and experts in MXFP4, where
            the checkpoint has them so), none (all in dtype), int8 or fp8 (rounded at start, embedding and head too;
            MXFP4 stays).
        max_model_len: longest prompt + generated text of one request, in tokens.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of one step, prefill chunks and decode rows together.
        block_size: tokens per KV page (16 on CPU, 64 on GPU).
        gpu_memory_utilization: share of the device's memory for weights, scratch and KV.
        kv_cache_memory_bytes: bytes for the KV arena, in place of that share; of each device.
        seed: of the requests that bring none.
        prefix_cache: reuse the KV of shared prefixes.
        prefix_cache_interval: keep what a request needs to resume at every so many tokens of a prompt too, not only
            where prompts and texts end and where texts part. Costs a window of local KV each, while memory lasts.
        load_format: auto (safetensors), or dummy: random weights from the config's shapes, no weight file is read.
        attention_backend: kernels of attention: auto (by device), xla (any), mosaic (Hopper), triton (NVIDIA since
            Ampere), reference (float32, for tests). One that cannot serve the model is an error, never another.
        moe_backend: kernels of experts: auto, xla, mosaic, reference.
        deterministic: run every step in one shape, so that a request's tokens do not depend on what else runs; slow.
        tensor_parallel_size: devices that share the model, each with its part of weights and KV; of all hosts together.
        nnodes: hosts that share the model, each with as many of those devices.
        node_rank: which of them this process is; left out, what Slurm, MPI or a LeaderWorkerSet say. The first, 0,
            serves, and tells the others what to run.
        dist_init_addr: HOST:PORT at which the first host is found by the others; left out, likewise.
        lora_modules: LoRA adapters in PEFT's format that requests may choose by name, name=folder each (in Python also
            a mapping).
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    quantization: Literal["auto", "none", "int8", "fp8"] = "auto"
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
    attention_backend: Literal["auto", "xla", "mosaic", "triton", "reference"] = "auto"
    moe_backend: Literal["auto", "xla", "mosaic", "reference"] = "auto"
    deterministic: bool = False
    tensor_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    dist_init_addr: str | None = None
    lora_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "kv_cache_memory_bytes",
            "prefix_cache_interval",
            "tensor_parallel_size",
            "nnodes",
        ):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(name, value, "must be a whole number of at least 1")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", 1, "must leave room for a prompt and a generated token: at least 2")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(name, getattr(self, name), f"must be {', '.join(choices[:-1])} or {choices[-1]}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must be a whole number in [0, 2^63)")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError("prefix_cache", self.prefix_cache, "must be True or False")
        _adapter_folders(self.lora_modules)

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of LoRA adapters by name."""
        return _adapter_folders(self.lora_modules)


_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal
}


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
    def max_extras(self) -> int:
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


def _adapter_folders(modules: Sequence[str]) -> dict[str, Path]:
    """Folders of LoRA adapters by name, in order, from `name=folder` entries. Raises ConfigError."""
    if not isinstance(modules, tuple) or not all(isinstance(module, str) for module in modules):
        raise ConfigError("lora_modules", modules, "must be a mapping of names to folders, or name=folder for each")
    if len(modules) > _MAX_ADAPTERS:
        raise ConfigError("lora_modules", f"{len(modules)} adapters", f"must be at most {_MAX_ADAPTERS}")
    folders: dict[str, Path] = {}
    for module in modules:
        name, _, folder = module.partition("=")
        if not name or not folder:
            raise ConfigError("lora_modules", module, "must be name=folder")
        if len(name) > _MAX_ADAPTER_NAME or not name.isprintable() or name != name.strip():
            raise ConfigError("lora_modules", module, f"the name must be 1 to {_MAX_ADAPTER_NAME} printable characters")
        if name in folders:
            raise ConfigError("lora_modules", module, f"{name!r} is given twice")
        folders[name] = Path(folder)
    return folders
