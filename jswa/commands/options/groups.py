"""What --help shows: options in groups, and help texts in whole lines."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter, Token

from jswa.commands.options.sizes import bytes_in, tokens_in

Groups = Mapping[str, Sequence[str]]

# Group: options of `EngineConfig`. An option that no group names is shown in the group "Other options".
ENGINE: Groups = {
    "Model": (
        "dtype", "quantization", "max_model_len", "revision", "download_dir", "load_format", "use_tqdm_on_load", "seed",
        "lora_modules", "max_loras", "max_lora_rank", "lora_experts", "language_model_only",
    ),
    "Memory and prefix cache": (
        "kv_cache_dtype", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "prefix_cache",
        "prefix_cache_interval", "radix_eviction_policy", "host_kv_bytes", "disk_kv", "kv_events_config",
    ),
    "Scheduling": (
        "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "cudagraph_capture_sizes",
        "deterministic", "enable_return_routed_experts",
    ),
    "Speculative decoding": ("speculative_config",),
    "Kernels": ("kernels",),
    "Several devices and hosts": (
        "tensor_parallel_size", "decode_context_parallel_size", "nnodes", "node_rank", "dist_init_addr",
    ),
}  # fmt: skip
OTHER = "Other options"
# Options with a size, in any dataclass of options.
TOKENS = {
    "max_model_len", "max_num_batched_tokens", "long_prefill_token_threshold", "prefix_cache_interval", "block_size",
    "max_queued_tokens", "output_tokens",
}  # fmt: skip
BYTES = {
    "kv_cache_memory_bytes", "host_kv_bytes", "max_body_size", "max_body_memory", "max_answer_memory", "max_image_size",
}  # fmt: skip
JSON_LISTS = {"allowed_origins"}  # vLLM takes a list in JSON alone
SIZES = (
    "TOKENS are a number such as 8192, 8k (8,000) or 8K (8,192). BYTES are a number such as 64G or 64GiB (2^30 each), "
    "64GB or 64g (10^9 each), or 1.5GiB."
)
# Empty defaults are not shown, and cannot be given as --empty-NAME: the texts say what happens without the option.
PLAIN = Parameter(
    negative_iterable=(), show_env_var=False, show_default=lambda value: None if value in ((), "") else value
)


def _read_by(read: Callable[[str], int]) -> Callable[[Any, Sequence[Token]], int]:
    return lambda kind, tokens: read(tokens[0].value)


OF_TOKENS = Parameter(converter=_read_by(tokens_in), metavar="TOKENS")
OF_BYTES = Parameter(converter=_read_by(bytes_in), metavar="BYTES")
NumberOfTokens = Annotated[int, OF_TOKENS]


@functools.cache
def _group(name: str) -> Group:
    """Return the group of this name; those asked for first are shown first."""
    return Group.create_ordered(name)


def grouped[Options](
    kind: type[Options], groups: Groups, second_names: Mapping[str, str] | None = None
) -> type[Options]:
    """Return a subclass of the frozen dataclass `kind` whose options are shown in these groups; nothing else differs.

    Some have a second name. The dataclass cannot name the groups itself: it is used without a command line, and
    without cyclopts, too.
    """
    group_of = {name: _group(group) for group, names in groups.items() for name in names}
    aliases = {name: f"--{second.replace('_', '-')}" for name, second in (second_names or {}).items()}
    shown = {
        name: Annotated[
            _with_reader(name, hint), Parameter(group=group_of.get(name) or _group(OTHER), alias=aliases.get(name))
        ]
        for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    text = re.sub(r"\n {8}(?=\S)", " ", inspect.cleandoc(kind.__doc__ or ""))
    names = {"__annotations__": shown, "__doc__": text, "__module__": kind.__module__}
    return dataclasses.dataclass(frozen=True)(type(kind.__name__, (kind,), names))


def _with_reader(name: str, hint: Any) -> Any:
    """Return the type of an option, with its reader if a size or a list in JSON may be given."""
    if name in JSON_LISTS:
        return Annotated[hint, Parameter(json_list=True)]
    read = OF_TOKENS if name in TOKENS else OF_BYTES if name in BYTES else None
    return hint if read is None else Annotated[hint, read]


def whole_lines[Command: Callable[..., object]](command: Command) -> Command:
    """Join the lines of each paragraph of a command's docstring: plain help keeps line breaks as they are."""
    text, heading, parameters = inspect.cleandoc(command.__doc__ or "").partition("\nParameters\n")
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    parameters = re.sub(r"(\n {4}.+)((?:\n {4}.+)+)", lambda m: m[1] + m[2].replace("\n    ", " "), parameters)
    command.__doc__ = text + heading + parameters
    return command
