"""`jswa convert`: a checkpoint as the engine holds it, for starts that read and do nothing else."""

import os
import shutil
from pathlib import Path
from typing import get_args

import jax.numpy as jnp

from jswa.errors import CheckpointError, ConfigError, JswaError
from jswa.model.weights.converted import MANIFEST, WEIGHTS, is_converted, write_converted
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.storage.folders import write_folder
from jswa.storage.json_object import read_object, shown

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def convert(source: Path, target: Path, dtype: str = "auto", quantization: QuantizationMode = "auto") -> int:
    """Write `target`, a folder that `LLM` loads as it loads `source`, and faster. Returns bytes of parameters.

    Everything beside the weights is copied. A folder that an earlier call has written is replaced when the new one is
    complete, anything else that is not empty is left alone.

    Args:
        dtype: of the parameters; auto: what config.json says, or else bfloat16. An engine of another type casts them.
        quantization: as the engine's: matrices that are held in fewer bits are stored so.

    Raises ConfigError for another dtype or quantization, ModelError where the checkpoint cannot be read, and
    CheckpointError where the target cannot be written.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError("dtype", dtype, f"must be auto, {', '.join(_DTYPES)}")
    if quantization not in get_args(QuantizationMode):
        raise ConfigError("quantization", quantization, f"must be one of {', '.join(get_args(QuantizationMode))}")
    source, target = source.resolve(), target.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target} must lie outside of the checkpoint {source}, and not around it")
    _require_replaceable(target)
    chosen = jnp.dtype(_own_dtype(source) if dtype == "auto" else dtype)
    model, params = load_checkpoint(source, chosen, quantization=quantization)

    def write(folder: Path) -> None:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != MANIFEST:
                shutil.copyfile(path, folder / path.name)
        write_converted(folder, model, params)

    try:
        write_folder(target, write, mode=0o755)
    except JswaError:
        raise
    except Exception as error:  # whatever orbax and the file system raise, one error comes out
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(f"{target} cannot be written: {type(error).__name__}: {reason}") from error
    return sum(value.nbytes for value in params.values())


def _own_dtype(folder: Path) -> str:
    """What config.json says of its weights."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    raw = read_object(folder / "config.json")
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if holder.get(key) in _DTYPES:
                return str(holder[key])
    return "bfloat16"


def _require_replaceable(target: Path) -> None:
    """Raise CheckpointError where something lies there that is not a converted checkpoint, whole or torn."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is not a folder: it is left alone")
    names = {path.name for path in target.iterdir()}
    if names and not (is_converted(target) and (target / WEIGHTS).is_dir()):
        raise CheckpointError(
            f"{target} holds {shown(sorted(names)[0])} and is not a converted checkpoint: it is left alone; choose "
            "another folder, or delete it"
        )
