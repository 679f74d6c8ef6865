"""One vector of a file that torch.save wrote. Its pickle is looked through and never run, as a pickle can run code.

Such a file is a zip archive: `*/data.pkl` says what there is, and `*/data/0` has the numbers of the first tensor.
"""

import pickletools
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import ml_dtypes
import numpy as np
from jaxtyping import Float

from jswa.errors import CheckpointError
from jswa.storage.checkpoint_files import open_file

_MOST_BYTES = 2**20  # of the pickle; a vector of 8,192 numbers has one of some hundred bytes
_TYPES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


def read_vector(path: Path, size: int) -> tuple[Float[np.ndarray, " n"], dict[str, int]]:
    """Return the only tensor of a file, in float32, and the whole numbers beside it by name.

    Args:
        size: how many numbers the tensor must have.

    Raises CheckpointError that names the file if it cannot be read or has something else.
    """
    try:
        with open_file(path) as file, ZipFile(file) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            data = [name for name in entries if name.startswith("data/")]
            if "data.pkl" not in entries or data != ["data/0"]:
                raise CheckpointError(f"{path.name}: must have one tensor, as torch.save writes it")
            for name, most in (("data.pkl", _MOST_BYTES), ("data/0", 4 * size)):
                if entries[name].compress_type != ZIP_STORED or entries[name].file_size > most:
                    raise CheckpointError(f"{path.name}: {name} must have at most {most} bytes, and not be compressed")
            names, numbers = _described(archive.read(entries["data.pkl"]))
            content = archive.read(entries["data/0"])
    except (OSError, BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path.name} cannot be read as torch.save writes a file: {error}") from error
    types = [_TYPES[name] for name in names if name in _TYPES]
    if len(types) != 1 or len(content) != types[0].itemsize * size:
        raise CheckpointError(f"{path.name}: must have {size} numbers in float32, float16 or bfloat16")
    return np.frombuffer(content, types[0]).astype(np.float32), numbers


def _described(pickled: bytes) -> tuple[list[str], dict[str, int]]:
    """Return the globals that a pickle names, and its whole numbers by the text before each."""
    names, numbers = list[str](), dict[str, int]()
    text: str | None = None
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            names.append(str(argument))
        elif "UNICODE" in opcode.name:
            text = argument
        elif isinstance(argument, int) and "INT" in opcode.name:
            numbers |= {} if text is None else {text: argument}
            text = None
        elif "PUT" not in opcode.name and opcode.name != "MEMOIZE":
            text = None
    return names, numbers
