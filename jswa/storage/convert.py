"""`jswa convert`: rewrite a checkpoint in the engine's own layout, so that a start only has to read it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax.numpy as jnp

from jswa.errors import CheckpointError, ConfigError, JswaError
from jswa.gguf.export import exporter
from jswa.gguf.pointer import pointed
from jswa.model.weights.converted import MANIFEST, WEIGHTS, is_converted, write_converted
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.storage.checkpoint_files import is_folder, open_file
from jswa.storage.folders import write_folder
from jswa.storage.json_object import read_object, shown
from pallas_kernels import Linear

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def convert(source: Path, target: Path, dtype: str = "auto", quantization: QuantizationMode = "auto") -> int:
    """Write `target`, a folder that `LLM` loads like `source` but faster. Return the bytes of the parameters.

    All files except the weights are copied. Of a GGUF file's view, `target` becomes a Hugging Face checkpoint with its
    weights in safetensors. A folder that an earlier call wrote is replaced as soon as the new one is
    complete; any other folder that is not empty is refused.

    Args:
        dtype: type of the parameters; auto: the type that config.json names, otherwise bfloat16. An engine that runs
            in another type casts them when it loads.
        quantization: the choices of EngineConfig.quantization; quantized matrices are stored quantized.

    Raises ConfigError for another dtype or quantization, ModelError if the checkpoint cannot be read, and
    CheckpointError if the target cannot be written.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError("dtype", dtype, f"must be one of auto, {', '.join(_DTYPES)}")
    if quantization not in get_args(QuantizationMode):
        raise ConfigError("quantization", quantization, f"must be one of {', '.join(get_args(QuantizationMode))}")
    source, target = source.resolve(), target.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target} must be neither inside the checkpoint {source} nor a parent of it")
    _require_replaceable(target)
    gguf = pointed(source)
    if gguf is not None:
        return _convert_gguf(source, gguf, target, dtype, quantization)
    chosen = jnp.dtype(_own_dtype(source) if dtype == "auto" else dtype)
    # As for the kernel that reads most forms: a folder with a scale per block serves the others too.
    linear: Linear = "mosaic" if quantization == "fp8" else "xla"
    model, params = load_checkpoint(source, chosen, quantization=quantization, linear=linear)

    def write(folder: Path) -> None:
        for path in sorted(source.iterdir()):
            if not path.is_dir() and not path.name.endswith(_WEIGHT_FILES) and path.name != MANIFEST:
                with open_file(path) as file, (folder / path.name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
        write_converted(folder, model, params)

    _write(target, write)
    return sum(value.nbytes for value in params.values())


def _convert_gguf(view: Path, gguf: Path, target: Path, dtype: str, quantization: QuantizationMode) -> int:
    """Write a GGUF checkpoint as safetensors. Raises ConfigError if another form than the file's is asked for."""
    if quantization != "auto":
        limit = "a GGUF file becomes a checkpoint in safetensors first: must be auto; convert its folder then"
        raise ConfigError("quantization", quantization, limit)
    write, size = exporter(view, gguf, _own_dtype(view) if dtype == "auto" else dtype)
    _write(target, write)
    return size


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill the target. Raises CheckpointError that says why it cannot be written."""
    try:
        write_folder(target, write, mode=0o755)
    except JswaError:
        raise
    except Exception as error:  # orbax and the file system raise many types
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(f"{target} cannot be written: {type(error).__name__}: {reason}") from error


def _own_dtype(folder: Path) -> str:
    """Return the type of the weights that config.json names, or bfloat16."""
    if not is_folder(folder):
        raise CheckpointError(f"{folder} is not a folder")
    raw = read_object(folder / "config.json")
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if holder.get(key) in _DTYPES:
                return str(holder[key])
    return "bfloat16"


def _require_replaceable(target: Path) -> None:
    """Raise CheckpointError if `target` holds anything but a converted checkpoint, complete or partial."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} exists and is not a folder")
    names = {path.name for path in target.iterdir()}
    if names and not (is_converted(target) and (target / WEIGHTS).is_dir()):
        raise CheckpointError(
            f"{target} contains {shown(sorted(names)[0])} and is not a converted checkpoint: choose another folder, or "
            "delete this one"
        )
