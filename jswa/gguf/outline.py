"""The outlines of GGUF files that are elsewhere: files with their headers, and with holes in place of weights.

They are enough for the config and the tokenizer of a checkpoint, so it can be judged before it is downloaded.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from jswa.gguf.architectures import ARCHITECTURES
from jswa.gguf.families.keys import MAX_LAYERS
from jswa.gguf.families.rope import FACTORS, LONG, SHORT
from jswa.gguf.file.header import Gguf, GgufTensor, header_of

_MOST_BYTES = 2**20  # of a tensor that tells a config something
_MOST_TENSORS = 4 * MAX_LAYERS


@runtime_checkable
class Source(Protocol):
    """A file of which parts can be read: `read(begin, count)` returns `count` bytes."""

    @property
    def size(self) -> int:
        """Return the bytes of the file."""

    def read(self, begin: int, count: int) -> bytes:
        """Return a part of the file."""


def write_outlines(paths: Sequence[Path], sources: Sequence[Source]) -> None:
    """Write the outline of each file of a checkpoint. The first file's architecture tells which vectors have a meaning.

    Raises CheckpointError as `read_gguf` does, what `Source.read` raises, and OSError.
    """
    stems: Collection[str] = ()
    for path, source in zip(paths, sources, strict=True):
        with path.open("wb") as out:
            out.truncate(source.size)
            header = header_of(_Copied(source, out), source.size, path)
            stems = stems or _stems(header)
            wanted = [tensor for tensor in header.tensors.values() if _is_wanted(tensor, stems)]
            for tensor in wanted[:_MOST_TENSORS]:
                out.seek(tensor.begin)
                out.write(source.read(tensor.begin, tensor.size))


class _Copied:
    """A source, read from its first byte on, and written to a file as far as it is read."""

    def __init__(self, source: Source, out: BinaryIO) -> None:
        self._source, self._out = source, out

    def read(self, count: int) -> bytes:
        at = self._out.tell()
        count = min(count, self._source.size - at)
        data = self._source.read(at, count) if count else b""
        self._out.write(data)
        return data


def _stems(header: Gguf) -> Collection[str]:
    """Return the stems of tensors of layers that configs are read of."""
    name = header.metadata.get("general.architecture")
    return ARCHITECTURES[name].left_out if isinstance(name, str) and name in ARCHITECTURES else ()


def _is_wanted(tensor: GgufTensor, stems: Collection[str]) -> bool:
    named = tensor.name in (FACTORS, LONG, SHORT) or (
        tensor.name.startswith("blk.") and tensor.name.removesuffix(".weight").rpartition(".")[2] in stems
    )
    return named and tensor.size <= _MOST_BYTES
