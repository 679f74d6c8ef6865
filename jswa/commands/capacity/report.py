"""`jswa capacity`: does a model fit, how long a context, how many requests, and what other engines hold."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jswa.architecture import ModelConfig
from jswa.cache.capacity import padding
from jswa.cache.layout import KVLayout
from jswa.commands.capacity.fit import GIB, GPUS, Fit, Gpu, compare, describe, find_gpus, fit_on
from jswa.commands.capacity.table import FIXED_RATIO, table
from jswa.errors import ConfigError, HubError
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.partition import shard_config
from jswa.model.weights.formats import QuantizationMode
from jswa.storage.checkpoint_files import is_folder
from jswa.storage.hub import find_model
from jswa.storage.json_object import read_object

_CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
_MEMORY = 75 * GIB  # for the table, where no single GPU says how much is left


def report(
    model: str,
    *,
    block_size: int,
    itemsize: int,
    memory: int | None = None,
    gpu: str | None = None,
    devices: int = 1,
    context: int = 1,
    quantization: QuantizationMode = "auto",
    language_model_only: bool = False,
    revision: str | None = None,
) -> list[str]:
    """Return the report for a model as lines: first whether it fits, then the table of KV sizes.

    Args:
        model: a config.json, or a folder or a hub id, as for `LLM`. Of a hub id only config.json is downloaded, and
            nothing if the config is shipped with jswa and no revision is given.
        memory: bytes for KV on each device, for the table. Default: what the GPU leaves, if it is only one.
        gpu: name or size; see `find_gpus`.
        context: of these devices, those that share the tokens of a full layer's KV head.
        quantization: how the weights are held, as for the engine.
        language_model_only: without the vision tower, as for the engine.

    Raises ConfigError for an unknown GPU and too little memory, and ModelError as `parse_config` and `find_model` do.
    """
    gpus = find_gpus(gpu)
    raw = read_object(config_file(model, revision))
    options: dict[str, Any] = {"block_size": block_size, "itemsize": itemsize, "devices": devices, "context": context}
    options |= {"quantization": quantization, "language_model_only": language_model_only}
    config, fits = fits_of(raw, gpus, **options)
    layout, weights = fits[0].layout, fits[0].weights
    if len(fits) > 1:
        answer = compare(model, fits, config, devices)
    else:
        answer = describe(model, fits[0], config, devices)
        if not fits[0].fits:
            answer.append(_remedy(fits[0], config, raw, language_model_only=language_model_only))
        elif memory is None:
            memory = fits[0].kv
    memory = _MEMORY if memory is None else memory
    return [*answer, "", *_table(config, layout, itemsize, memory, weights, devices)]


def fits_of(
    raw: dict[str, Any],
    gpus: Sequence[Gpu],
    *,
    block_size: int,
    itemsize: int,
    devices: int = 1,
    context: int = 1,
    quantization: QuantizationMode = "auto",
    language_model_only: bool = False,
) -> tuple[ModelConfig, list[Fit]]:
    """Return one device's share of a model, and what each GPU holds of it.

    Args:
        raw: the content of config.json.
        block_size: tokens of a page.
        itemsize: bytes per element of the KV cache.
        context: see `report`.
        quantization, language_model_only: see `report`.

    Raises ConfigError if so many devices cannot share the model, and ModelError as `parse_config` does.
    """
    config = shard_config(parse_config(raw, weights=False), devices, context)
    layout = KVLayout.of(config, block_size)
    weights = _weights(config, raw, quantization, itemsize, language_model_only=language_model_only)
    return config, [fit_on(one, config, layout, weights=weights, itemsize=itemsize) for one in gpus]


def _weights(
    config: ModelConfig,
    raw: dict[str, Any],
    quantization: QuantizationMode,
    itemsize: int,
    *,
    language_model_only: bool,
) -> int:
    """Return the bytes of one device's share of the weights, with the tower that the first device has."""
    from jswa.building.images import tower_bytes  # they import jax, which takes a second
    from jswa.exec.sizing import weight_bytes

    dtype = _dtype(itemsize)
    tower = 0 if language_model_only else tower_bytes(raw, dtype)
    return weight_bytes(config, parse_quantization(raw), quantization, dtype) + tower


def _dtype(itemsize: int) -> str:
    """Return the type of the weights beside a KV cache of `itemsize` bytes per element."""
    return "float32" if itemsize == 4 else "bfloat16"


def config_file(model: str, revision: str | None = None) -> Path:
    """Return the path of a model's config.json: a file, in a folder, of a GGUF file, shipped with jswa, or downloaded.

    Raises CheckpointError if there is none and the name is no hub id, and HubError if a download fails.
    """
    path = Path(model)
    if path.suffix == ".json" or (path.is_file() and path.suffix != ".gguf"):
        return Path(os.path.realpath(path))  # the user has named the file, so it may be a link to anywhere
    shipped = _CONFIGS / model / "config.json"
    if revision is None and not is_folder(path) and model.count("/") == 1 and shipped.is_file():
        return shipped
    try:
        return find_model(model, revision=revision, needed="config") / "config.json"
    except HubError as error:
        raise HubError(f"{error}. A config.json, or a folder that has one, works in place of the name") from error


def _remedy(fit: Fit, config: ModelConfig, raw: dict[str, Any], *, language_model_only: bool) -> str:
    """Return what to do with a model that does not fit, as a line."""

    def holds(gpu: Gpu, weights: int) -> bool:
        return fit_on(gpu, config, fit.layout, weights=weights, itemsize=fit.itemsize).fits

    ways = ["share it between more GPUs with --tensor-parallel-size"]
    larger = next((name for name, gpu in GPUS.items() if holds(gpu, fit.weights)), None)
    if larger is not None:
        ways.insert(0, f"take a larger GPU (--gpu {larger})")
    rounded = _weights(config, raw, "int8", fit.itemsize, language_model_only=language_model_only)
    if rounded < fit.weights and holds(fit.gpu, rounded):
        ways.insert(0, f"hold its weights in 8 bits with jswa serve --quantization int8 ({rounded / GIB:.1f} GiB)")
    return f"  remedy     {', or '.join(ways)}"


def _table(config: ModelConfig, layout: KVLayout, itemsize: int, memory: int, weights: int, devices: int) -> list[str]:
    """Return the KV sizes of sequences as lines. Raises ConfigError if the memory holds no page."""
    least = 2 * layout.slab_bytes(itemsize)
    if memory < least:
        raise ConfigError("memory_gib", memory / GIB, f"must be at least {least / GIB:.3g}, the size of two pages")
    rows = table(config, layout, itemsize=itemsize, memory=memory)
    kinds = ", ".join(
        f"{kind.num_layers} {name} layers of {kind.num_kv_heads} x ({kind.row - kind.v_head_dim} + {kind.v_head_dim})"
        + (f", tokens on {kind.parts} devices" if kind.parts > 1 else "")
        for name, kind in (("full", layout.full), ("local", layout.local))
        if kind is not None
    )
    reach = layout.reach
    window = "" if reach is None else f", {'chunk' if reach.chunked else 'window'} {reach.size}"
    window += f" and {reach.lookback} before it" if reach is not None and reach.lookback else ""
    head = f"{'tokens':>8} {'KV here':>10} {'ideal':>10} {'share':>7} {'all full':>10}   rows in {_gib(memory)} GiB:"
    lines = [
        f"{config.family}: {kinds}{window}",
        f"{layout.num_lanes} lanes, slabs of {layout.slab_bytes(itemsize)} bytes: {layout.pages_per_slab} full "
        f"pages or 1 local page of {layout.page_size} tokens; padding {padding(layout):.1%}",
        f"{head} here, all full, SGLang's pools (ratio {FIXED_RATIO}), vLLM's groups",
    ]
    lines += [
        f"{row.length:>8} {_gib(row.bytes_here):>10} {_gib(row.bytes_ideal):>10} {row.share_of_ideal:>7.1%} "
        f"{_gib(row.bytes_full):>10}   {row.rows_here:>6.1f}, {row.rows_full:.1f}, {row.rows_fixed_ratio:.1f}, "
        f"{row.rows_grouped:.1f}"
        for row in rows
    ]
    each = "the device" if devices == 1 else f"each of {devices} devices"
    lines.append(f"{each} holds {_gib(weights)} GiB of weights, {_gib(weights + memory)} GiB with KV")
    if devices > 1:
        lines.append("the KV sizes above are per device")
    return [*lines, "KV is in GiB per row, in whole pages; share = ideal / here: the rest is padding and partial pages"]


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"
