"""The options that the user gives (`EngineConfig`) and the limits that follow from them (`Limits`). No jax here."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jswa.architecture import ModelConfig
from jswa.errors import ConfigError
from jswa.kernels import named_in
from jswa.speculation import Speculation, parse

if TYPE_CHECKING:  # what a step program imports is kept small, so checks of options are imported when they are made
    from jswa.options.lora import LoraRoom

EvictionPolicy = Literal["learned", "lru"]


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine. Names follow vLLM if vLLM has the option.

    Attributes:
        dtype: Keep weights, activations and KV cache in this type; auto is float32 on CPU and bfloat16 on GPU.
        kv_cache_dtype: Keep the KV cache in this type; auto is the same as dtype. fp8 (e4m3) takes half the bytes of
            bfloat16. It clips keys and values beyond ±448 times their scale, which is 1 unless the checkpoint has KV
            scales.
        quantization: Hold linear layers and experts in this form. auto keeps the checkpoint's own form: 8 bits with one
            scale per output, packed integers of 4 bits (W4A16, GPTQ, AWQ), MXFP4 experts. none converts all weights to
            dtype. int8 and fp8 quantize linear layers, embedding and output head at start, and keep MXFP4 experts. fp8
            also keeps experts in fp8 with a scale per block, and with --kernels linear=mosaic such linear layers too.
            w8a8_fp8 is fp8, or auto for checkpoints in fp8, and also rounds the activations of linear layers, with a
            scale per token, so the numbers change. It is for NVIDIA GPUs since Ada (8.9), and runs on a CPU slowly.
            mxfp4 is auto for checkpoints whose experts are in MXFP4, and refuses others; with load_format dummy it
            makes random MXFP4 experts.
        max_model_len: Accept at most this many tokens per request, prompt and generated text together. Default: the
            model's maximum.
        max_num_seqs: Run at most this many sequences at the same time. Default: 16 on CPU, 256 on GPU, on GPUs of 140
            GB up to 1024, as many as fit with 2048 tokens each.
        max_num_batched_tokens: Run at most this many tokens per step, of prefill chunks and decoding sequences
            together. Default: 512 on CPU, 2048 on GPU (8192 for mixtures of experts on 140 GB), but at least
            max_num_seqs.
        long_prefill_token_threshold: A prompt is long while more tokens than this are left to prefill. If the waiting
            prompts need more than one step, the oldest prompt gets this many tokens of each step, and shorter prompts
            come first for the rest. Short prompts also overtake long prompts in the queue. Default: a quarter of
            max_num_batched_tokens.
        block_size: Keep this many tokens in a KV page. Default: 16 on CPU, 64 on GPU.
        gpu_memory_utilization: Use this fraction of the GPU's memory for weights, temporary buffers and KV cache.
        kv_cache_memory_bytes: Give the KV cache this many bytes on each device. Default: the share of
            gpu_memory_utilization that weights and temporary buffers leave; on CPU room for 32 requests of
            max_model_len, or for max_num_seqs if that is more, up to a quarter of all memory and 4 GiB.
        cudagraph_capture_sizes: Compile step programs for these batch sizes, each a CUDA graph on a GPU. Sizes up to
            max_num_seqs count the sequences of a step with one token each, larger sizes count the tokens of a step.
            They must include max_num_seqs and max_num_batched_tokens. A step runs in the smallest size that holds it.
            Default: powers of two, and on a GPU large sizes between them. On a GPU numbers of sequences are rounded up
            to multiples of 8. If sizes are given, all are compiled before the first request; otherwise most are
            compiled while requests run.
        seed: Seed of the requests that do not set one.
        language_model_only: Run a model that reads images on text only: its tower is not loaded, and images are
            refused.
        prefix_cache: Reuse the KV of prompt prefixes that earlier requests have computed.
        prefix_cache_interval: Keep a resume point, from which a later request can go on, at every multiple of this many
            prompt tokens too. Each costs the KV of one window of the sliding-window layers. Default: resume points only
            at the ends of prompts and generated texts, and where texts diverge.
        radix_eviction_policy: Choose by this rule what the prefix cache evicts when memory is short. learned evicts the
            KV that requests will probably miss least, by what it has seen of earlier requests. lru evicts the KV that
            was used least recently.
        host_kv_bytes: Keep up to this many bytes of evicted KV in host memory, as a second prefix cache. It is copied
            back when a request asks for it. 0 keeps none.
        disk_kv: Write the KV that is in host memory (host_kv_bytes) to files too, given as PATH:BYTES with a folder and
            the bytes that the files may take. It is read when a request asks for it, also after a restart. The files
            hold KV of all clients. Default: no files.
        revision: Take this branch, tag or commit of a model on the Hugging Face Hub. Default: its main branch.
        download_dir: Keep models from the Hugging Face Hub in this folder. Default: the hub's cache (HF_HOME).
        load_format: auto reads safetensors. dummy makes random weights in the config's shapes, without any weight file.
        use_tqdm_on_load: Show progress bars while the engine starts, if stderr is a terminal.
        kernels: Run these kernels, for tests and measurements. auto chooses by device and model (docs/kernels.md has
            the table); xla is plain XLA for all operations; reference is float32 code for the operations that have it.
            Or name the kernels of some operations, as in attention=triton,experts=xla, and auto chooses the others. The
            operations are attention, experts, linear, elementwise, routing and sampling. A named kernel that cannot run
            is an error.
        deterministic: Compute the same bits for a request whatever else the engine runs. On a CPU with compiled kernels
            this costs nothing for most models. On Hopper, models with plain weights keep their batch shapes. Elsewhere
            every step has the same batch shape, which is slow.
        enable_return_routed_experts: Return the experts that routers choose with the log probabilities of rollouts and
            scores (docs/rl.md); the model must have experts.
        tensor_parallel_size: Share the model between this many devices, over all hosts. Each holds a part of the
            weights and of the KV cache.
        decode_context_parallel_size: Spread the tokens of the full-attention layers over this many of the devices that
            store the same KV head, so that each token is stored once. It must divide tensor_parallel_size divided by
            the KV heads of a full layer.
        nnodes: Share the model between this many hosts. Each has the same number of devices.
        node_rank: Rank of this host, counted from 0. Host 0 serves requests and tells the other hosts which steps to
            run. Default: the rank that Slurm, MPI or a LeaderWorkerSet gives.
        dist_init_addr: HOST:PORT at which the other hosts reach host 0. Default: the address that Slurm, MPI or a
            LeaderWorkerSet gives.
        lora_modules: Load these LoRA adapters, each given as NAME=FOLDER with a folder in PEFT's format (in Python also
            a mapping). Requests choose an adapter by its name.
        max_loras: Reserve memory for this many LoRA adapters, so that adapters can be loaded and unloaded while the
            engine runs. Default: memory for lora_modules only, which then cannot be replaced.
        max_lora_rank: Reserve memory for LoRA adapters up to this rank. Default: 16, if max_loras is given.
        lora_experts: Reserve memory for LoRA adapters of experts too, many times as much as for other layers; with
            max_loras or max_lora_rank. Without them, lora_modules may adapt experts in any case.
        speculative_config: Draft tokens and check several in one step; no token changes. A JSON object with method,
            num_speculative_tokens (drafts per sequence and step: at most this many, 1 to 7), model (the drafter's
            checkpoint) and others. Methods without a model copy the tokens that followed the same tokens before: ngram
            in the text itself, suffix also in cached texts. For both, prompt_lookup_max and prompt_lookup_min say how
            many tokens must be the same (default: 5 and 2). Methods with weights: dflash, dspark, eagle3 and
            gemma4_assistant, with a model, and mtp, whose layers are in the target's checkpoint. In Python also a
            mapping. Default: no drafts.
        kv_events_config: Publish over ZeroMQ which blocks of tokens come into the prefix cache and leave it, for
            routers, in vLLM's form. A JSON object with vLLM's fields: enable_kv_cache_events, publisher, endpoint,
            replay_endpoint, buffer_steps, hwm, max_queue_size and topic. Whoever reaches the endpoint can read the
            tokens of all prompts. In Python also a mapping. Default: no events.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    quantization: Literal["auto", "none", "int8", "fp8", "w8a8_fp8", "mxfp4"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    seed: int = 0
    language_model_only: bool = False
    prefix_cache: bool = True
    prefix_cache_interval: int | None = None
    radix_eviction_policy: EvictionPolicy = "learned"
    host_kv_bytes: int = 0
    disk_kv: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    use_tqdm_on_load: bool = True
    kernels: str = "auto"
    deterministic: bool = False
    enable_return_routed_experts: bool = False
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    dist_init_addr: str | None = None
    lora_modules: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_experts: bool = False
    speculative_config: str | None = None
    kv_events_config: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
            "block_size",
            "kv_cache_memory_bytes",
            "prefix_cache_interval",
            "tensor_parallel_size",
            "decode_context_parallel_size",
            "nnodes",
            "max_loras",
            "max_lora_rank",
        ):
            _check_count(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", 1, "must leave room for a prompt and a generated token: at least 2")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(name, getattr(self, name), f"must be {', '.join(choices[:-1])} or {choices[-1]}")
        for name in ("revision", "download_dir"):
            _check_text(name, getattr(self, name))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must be a whole number in [0, 2^63)")
        for name in ("prefix_cache", "language_model_only"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be True or False")
        _check_host_memory(self)
        named_in(self.kernels)
        parse(self.speculative_config)
        _check_events(self.kv_events_config, prefix_cache=self.prefix_cache)
        _check_sizes(self.cudagraph_capture_sizes, deterministic=self.deterministic)
        _ = self.lora_room  # raises ConfigError

    @property
    def lora_room(self) -> "LoraRoom | None":
        """The room to reserve for adapters; None: as much as `lora_modules` take, and no adapter is loaded later."""
        modules = len(self.adapters)
        from jswa.options.lora import room_of

        return room_of(self.max_loras, self.max_lora_rank, modules, experts=self.lora_experts)

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of LoRA adapters by name."""
        from jswa.options.lora import adapter_folders

        return adapter_folders(self.lora_modules)


_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal
}


class HostMemory(NamedTuple):
    """The second prefix cache, in host memory.

    Attributes:
        slabs: of the size of the arena's, one of which is not used, as slab 0 is not on the device.
        slots_per_step: slots that are copied to the device with each step, or a few more.
        tokens_per_slot: tokens that could be computed in the time in which a slot is copied to the device.
        seconds_per_token: time in which a token is computed.
    """

    slabs: int
    slots_per_step: int
    tokens_per_slot: float
    seconds_per_token: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What the engine runs with, all chosen. Made by `resolve_limits`; sizes the arena, the tables and the buckets."""

    max_model_len: int
    max_rows: int
    max_tokens: int
    page_size: int
    num_slabs: int = field(default=0)
    step_sizes: tuple[int, ...] = ()
    one_bucket: bool = False
    deterministic: bool = False
    routed_experts: bool = False
    prefix_cache: bool = True
    prefix_cache_interval: int | None = None
    radix_eviction_policy: EvictionPolicy = "learned"
    long_prefill: int = 0
    speculation: Speculation | None = None
    host: HostMemory | None = None

    @property
    def long_prompt(self) -> int:
        """Prompts with more tokens than this to prefill are long; a quarter of a step unless `long_prefill` is set."""
        return self.long_prefill or max(1, self.max_tokens // 4)

    @property
    def pages_per_row(self) -> int:
        """Width of a page table: pages that hold max_model_len tokens."""
        return math.ceil(self.max_model_len / self.page_size)


GPU_STEP = 256, 2_048  # rows and tokens


def resolve_limits(
    options: EngineConfig, model: ModelConfig, *, on_gpu: bool, gpu_step: tuple[int, int] = GPU_STEP
) -> Limits:
    """Fill in the options that were left open; the arena's size comes later, when the weights are on the device.

    Args:
        gpu_step: rows and tokens of a step on a GPU where the options leave them open; see `sizing.gpu_step`.

    Raises ConfigError where options contradict each other or the model.
    """
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError("max_model_len", max_model_len, f"the model was made for at most {model.max_position} tokens")
    if max_model_len < 2:
        raise ConfigError("max_model_len", max_model_len, "must be at least 2 (a prompt token and a generated one)")
    rows, tokens = gpu_step if on_gpu else (16, 512)
    max_rows = options.max_num_seqs or rows
    max_tokens = options.max_num_batched_tokens or max(max_rows, min(tokens, max_model_len))
    if max_tokens < max_rows:
        raise ConfigError("max_num_batched_tokens", max_tokens, f"must be at least max_num_seqs = {max_rows}")
    for name in ("enable_return_routed_experts", "lora_experts"):
        if getattr(options, name) and not any(layer.moe for layer in model.layers):
            raise ConfigError(name, True, "must be False: the model has no experts")
    page_size = options.block_size or (64 if on_gpu else 16)
    speculation = parse(options.speculative_config)
    if speculation is not None:
        speculation = speculation.of_length(max_model_len)
        if max_tokens < 1 + speculation.programs[-1]:
            limit = f"must be at least {1 + speculation.programs[-1]}, a token and the drafts of one row"
            raise ConfigError("max_num_batched_tokens", max_tokens, limit)
    return Limits(
        max_model_len,
        max_rows,
        max_tokens,
        page_size,
        step_sizes=_step_sizes(options.cudagraph_capture_sizes, max_rows, max_tokens),
        one_bucket=options.deterministic,
        deterministic=options.deterministic,
        routed_experts=options.enable_return_routed_experts,
        prefix_cache=options.prefix_cache,
        prefix_cache_interval=options.prefix_cache_interval,
        radix_eviction_policy=options.radix_eviction_policy,
        long_prefill=options.long_prefill_token_threshold or 0,
        speculation=speculation,
    )


def _check_count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(name, value, "must be a whole number of at least 1")


def _check_host_memory(options: EngineConfig) -> None:
    """Raise ConfigError if a second prefix cache cannot be had with the other options."""
    # Imported late: what a step program imports is kept small, and none needs this.
    from jswa.commands.options.sizes import folder_and_bytes

    given = options.host_kv_bytes
    if not _is_int(given) or given < 0:
        raise ConfigError("host_kv_bytes", given, "must be a whole number of at least 0")
    if given and not options.prefix_cache:
        raise ConfigError("host_kv_bytes", given, "must be 0 with prefix_cache = False: it is a second prefix cache")
    if given and options.nnodes > 1:
        raise ConfigError("host_kv_bytes", given, f"must be 0 with nnodes = {options.nnodes}: one host is supported")
    if folder_and_bytes("disk_kv", options.disk_kv) is not None and not given:
        raise ConfigError("disk_kv", options.disk_kv, "must be left out without host_kv_bytes: texts go there first")


def _check_events(given: str | None, *, prefix_cache: bool) -> None:
    """Raise ConfigError if events about cached KV cannot be published as asked."""
    from jswa.kv_events.options import parse as parse_events

    if parse_events(given) is not None and not prefix_cache:
        limit = "must be left out with prefix_cache = False: events tell what that has"
        raise ConfigError("kv_events_config", given, limit)


def _check_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(name, value, "must be a text that is not empty")


def _check_sizes(sizes: tuple[int, ...], *, deterministic: bool) -> None:
    if not isinstance(sizes, tuple) or not all(_is_int(size) and size > 0 for size in sizes):
        raise ConfigError("cudagraph_capture_sizes", sizes, "must be whole numbers of at least 1")
    if sizes and deterministic:
        limit = "must be left out: deterministic = True chooses the batch shapes itself"
        raise ConfigError("cudagraph_capture_sizes", sizes, limit)


def _step_sizes(sizes: tuple[int, ...], max_rows: int, max_tokens: int) -> tuple[int, ...]:
    """Return the sizes in ascending order. Raises ConfigError unless some program holds every step."""
    for name, needed in (("max_num_seqs", max_rows), ("max_num_batched_tokens", max_tokens)):
        if sizes and needed not in sizes:
            limit = f"must include {name} = {needed}: without it, no program holds a step of that size"
            raise ConfigError("cudagraph_capture_sizes", sizes, limit)
    if sizes and max(sizes) > max_tokens:
        limit = f"must be at most max_num_batched_tokens = {max_tokens}"
        raise ConfigError("cudagraph_capture_sizes", sizes, limit)
    return tuple(sorted(set(sizes)))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
