"""The names of the files of a GGUF checkpoint: one, or several that `-00001-of-00003` in their names count."""

import re

from jswa.errors import CheckpointError
from jswa.storage.json_object import label

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST = 1000


def shard_names(name: str) -> list[str]:
    """Return the names of all files of a checkpoint, of which one is given.

    Raises CheckpointError if a name counts more than 1,000 files, or counts itself beyond them.
    """
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MOST:
        raise CheckpointError(f"{label(name)}: must be one of 1 to at most {_MOST} files")
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, count + 1)]
