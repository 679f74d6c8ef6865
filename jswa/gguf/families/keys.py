"""Typed reading of an architecture's metadata, and which keys nobody has read: a model that has one is refused."""

from collections.abc import Mapping
from typing import Any

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.gguf.file.header import GgufTensor, Value
from jswa.storage.json_object import label, shown

_HIGHEST = 2**31 - 1
_LARGEST = 1e300
MAX_LAYERS = 512
# Keys that change no number: facts that tensors show too, or notes of the program that wrote the file.
_NOTES = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "use_parallel_residual"})


class Model:
    """Metadata and tensors of a checkpoint, without the architecture's prefix, as the table's functions read them.

    Attributes:
        arch: llama.cpp's name of the architecture.
        where: the file, for error texts.
        layers: the layers of the decoder, without those for multi-token prediction.
        tensors: by llama.cpp's name.
    """

    def __init__(self, arch: str, metadata: Mapping[str, Value], tensors: Mapping[str, GgufTensor], where: str) -> None:
        """Take the metadata of an architecture. Raises CheckpointError if it does not count the layers."""
        self.arch, self.where, self.tensors = arch, where, tensors
        self._values = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{arch}.")}
        self._read: set[str] = set(_NOTES)
        blocks = self.integer("block_count")
        self.layers = blocks - self.integer("nextn_predict_layers", 0, low=0, high=blocks - 1)
        if self.layers > MAX_LAYERS:
            raise self.wrong("block_count", f"must be at most {MAX_LAYERS}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _HIGHEST) -> int:
        """Return a whole number in [low, high]; without a default the key must be there. Raises CheckpointError."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0; without a default the key must be there. Raises CheckpointError."""
        value = self._take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self.wrong(key, "must be a finite number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Return a finite number above 0, or None if the key is absent or 0. Raises CheckpointError."""
        return None if self._take(key, 0) == 0 else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises CheckpointError."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string. Raises CheckpointError."""
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def each(self, key: str, default: Any = None) -> list[Any]:
        """Return one number or boolean for each layer, of a list or of one value for all. Raises CheckpointError."""
        value = self._take(key, default)
        if not isinstance(value, list):
            return [value] * self.layers
        if len(value) < self.layers:
            raise self.wrong(key, f"must be one value, or list one for each of {self.layers} layers")
        return value[: self.layers]

    def widths(self, key: str, default: int | None = None) -> list[int]:
        """Return a whole number from 1 for each layer. Raises CheckpointError."""
        values = self.each(key, default)
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 < one <= _HIGHEST for one in values):
            raise self.wrong(key, f"must be whole numbers from 1 to {_HIGHEST}")
        return values

    def same(self, key: str, default: int | None = None) -> int:
        """Return a whole number that is the same for all layers. Raises CheckpointError."""
        values = self.widths(key, default)
        if len(set(values)) != 1:
            raise self.wrong(key, "must be the same for all layers")
        return values[0]

    def sliding(self, period: int, *, full_at: int = -1) -> list[bool]:
        """Return which layers slide: as the file says, or all but every `period`-th (none if it is 1).

        Args:
            full_at: the place of the full layer in a period: the last, or the first if it is 0.

        Raises CheckpointError for any other value.
        """
        key = "attention.sliding_window_pattern"
        value = self._take(key, period)
        if isinstance(value, list):
            if not all(one in (0, 1) for one in value):
                raise self.wrong(key, "must be a period, or list true or false for each layer")
            return [bool(one) for one in self.each(key)]
        period = self.integer(key, period, low=0)
        return [period == 0 or (index - full_at) % period != 0 for index in range(self.layers)]

    def requires(self, key: str, wanted: object) -> None:
        """Raise UnsupportedModel if a key is there with another value than the one that jswa computes with."""
        value = self._take(key, wanted)
        if value != wanted and not (isinstance(value, list) and all(one == wanted for one in value)):
            raise UnsupportedModel(f"{self.where}: {self.arch}.{key} = {shown(value)}: must be {wanted}")

    def which(self, name: str) -> list[bool]:
        """Return which layers have a tensor of this name, such as "attn_q.bias"."""
        return [f"blk.{index}.{name}" in self.tensors for index in range(self.layers)]

    def has(self, name: str) -> bool:
        """Return whether any layer has a tensor of this name."""
        return any(self.which(name))

    def tensor(self, name: str) -> GgufTensor:
        """Return a tensor. Raises CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.where} has no tensor {label(name)}")
        return self.tensors[name]

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor, or of that of the first layer that has one. Raises CheckpointError."""
        names = (name, *(f"blk.{index}.{name}" for index in range(self.layers)))
        found = self.tensor(next((one for one in names if one in self.tensors), name))
        if len(found.shape) != rank:
            raise CheckpointError(f"{found.where} has shape {shown(list(found.shape))}: must have {rank} axes")
        return found.shape

    def wrong(self, key: str, limit: str) -> CheckpointError:
        """Return the error for the value of a key."""
        if key not in self._values:
            return CheckpointError(f"{self.where}: metadata key {self.arch}.{key} is missing: {limit}")
        return CheckpointError(f"{self.where}: {self.arch}.{key} = {shown(self._values[key])}: {limit}")

    def require_all_read(self) -> None:
        """Raise UnsupportedModel that names a key which nobody has read: it may change the model."""
        unread = sorted(self._values.keys() - self._read)
        if unread:
            names = ", ".join(label(f"{self.arch}.{key}") for key in unread[:5])
            raise UnsupportedModel(f"{self.where}: metadata that jswa does not know for {self.arch}: {names}")

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self._values.get(key, default)
