"""How a checkpoint's hidden states become embeddings: which one is taken, whether it is normalized, how it may be cut.

    prompt ─▶ hidden states [T, M] ─▶ last or mean [M] ─▶ its first numbers, if dimensions are asked for ─▶ length 1

Checkpoints of sentence-transformers say so in modules.json and 1_Pooling/config.json. Of any other checkpoint it is the
last token's, normalized, as in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jswa.errors import CheckpointError, RequestError
from jswa.storage.checkpoint_files import is_there
from jswa.storage.json_object import read_list, read_object, read_optional, shown
from jswa.types import Pooling, SamplingParams

POOLING_CONFIG = "1_Pooling/config.json"
MODULES = "modules.json"
_MOST_BYTES = 2**20
_MOST_MODULES = 16
_MOST_DIMENSIONS = 256  # entries of matryoshka_dimensions
_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean"}  # those that jswa has
_SMALLEST = 1e-12  # of the length that a vector is divided by


@dataclass(frozen=True)
class PoolingConfig:
    """How embeddings are made of hidden states.

    Attributes:
        pooling: whose hidden state it is.
        normalize: whether its length is made 1, unless a request says otherwise.
        matryoshka: to which numbers of dimensions embeddings may be cut: (): any; None: they may not.
        refused: what the checkpoint asks for and jswa lacks; then it gives no embeddings. None: nothing.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    matryoshka: tuple[int, ...] | None = None
    refused: str | None = None

    @staticmethod
    def load(folder: Path) -> "PoolingConfig":
        """Read the settings of a checkpoint's folder. Raises CheckpointError if one of its files is corrupt."""
        matryoshka = _matryoshka(folder)
        if not is_there(folder / MODULES):
            return PoolingConfig(matryoshka=matryoshka)
        kinds = _modules(folder)
        if (
            missing := next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
        ) is not None:
            return PoolingConfig(refused=f"{MODULES} has a module {shown(missing)}")
        pooling, refused = _pooling(folder) if "Pooling" in kinds else ("last", None)
        return PoolingConfig(pooling, "Normalize" in kinds, matryoshka, refused)

    def params(self, dimensions: int | None = None) -> SamplingParams:
        """Return the sampling parameters of a request for an embedding: its one token is not used.

        Raises RequestError if the checkpoint gives no embeddings, or none of so many dimensions.
        """
        if self.refused is not None:
            raise RequestError("model", "this checkpoint", f"must be one that gives embeddings: {self.refused}")
        if dimensions is not None:
            if self.matryoshka is None:
                limit = "must be left out: the model's config.json has neither is_matryoshka nor matryoshka_dimensions"
                raise RequestError("dimensions", dimensions, limit)
            if dimensions < 1 or (self.matryoshka and dimensions not in self.matryoshka):
                allowed = ", ".join(map(str, self.matryoshka)) or "at least 1"
                raise RequestError("dimensions", dimensions, f"must be {'one of ' * bool(self.matryoshka)}{allowed}")
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling=self.pooling)

    def embedding(
        self, pooled: Float[np.ndarray, " M"], dimensions: int | None = None, normalize: bool | None = None
    ) -> Float[np.ndarray, " D"]:
        """Return the embedding of a pooled hidden state. Raises RequestError if it has fewer dimensions.

        Args:
            normalize: whether its length is made 1; None: as the checkpoint says.
        """
        if dimensions is not None and dimensions > len(pooled):
            raise RequestError("dimensions", dimensions, f"must be at most {len(pooled)}, the model's hidden size")
        vector = pooled[:dimensions]
        if not (self.normalize if normalize is None else normalize):
            return vector
        length = float(np.linalg.norm(vector.astype(np.float64)))
        return (vector / max(length, _SMALLEST)).astype(np.float32)


DEFAULT = PoolingConfig()


def similarity(one: Float[np.ndarray, " D"], other: Float[np.ndarray, " D"]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), _SMALLEST))


def pairs(first: int, second: int) -> list[tuple[int, int]]:
    """Return which texts are compared, of so many on each side: one with each, or each with its own.

    Raises RequestError unless there is one text on the first side, or as many as on the second.
    """
    if not first or first not in (1, second):
        limit = "must have one text, or as many as text_2"
        raise RequestError("text_1", f"{first} texts, and text_2 has {second}", limit)
    return [(0 if first == 1 else index, index) for index in range(second)]


def _modules(folder: Path) -> list[str]:
    """Return the kinds of the modules of sentence-transformers, in their order. Raises CheckpointError."""
    path = folder / MODULES
    found = read_list(path, _MOST_BYTES)
    if len(found) > _MOST_MODULES:
        raise CheckpointError(f"{path} has {len(found)} modules: must have at most {_MOST_MODULES}")
    kinds = [one.get("type") if isinstance(one, dict) else None for one in found]
    for kind in kinds:
        if not isinstance(kind, str):
            raise CheckpointError(f"{path}: type = {shown(kind)}: must be a string")
    return [str(kind).rpartition(".")[2] for kind in kinds]


def _pooling(folder: Path) -> tuple[Pooling, str | None]:
    """Return what 1_Pooling/config.json asks for, and what of that jswa lacks. Raises CheckpointError."""
    path = folder / POOLING_CONFIG
    config = read_object(path, folder, _MOST_BYTES)
    modes = [_mode(key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    named = config.get("pooling_mode")
    if isinstance(named, str):  # the form of sentence-transformers from version 5 on
        modes = [named]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], None
    allowed = " or ".join(_MODES)
    return "last", f"{POOLING_CONFIG} asks for pooling by {shown('+'.join(modes) or named)}, and jswa has {allowed}"


def _mode(key: str) -> str:
    """Return the name of a pooling mode by its older key: `pooling_mode_mean_tokens`, `pooling_mode_lasttoken`."""
    return key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")


def _matryoshka(folder: Path) -> tuple[int, ...] | None:
    """Return the numbers of dimensions that config.json allows; see `PoolingConfig`. Raises CheckpointError."""
    path = folder / "config.json"
    config: dict[str, Any] = read_optional(path)
    listed, flag = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if listed is None:
        if flag is not None and not isinstance(flag, bool):
            raise CheckpointError(f"{path}: is_matryoshka = {shown(flag)}: must be true or false")
        return () if flag else None
    whole = isinstance(listed, list) and 0 < len(listed) <= _MOST_DIMENSIONS
    if not whole or not all(type(size) is int and 0 < size <= 2**20 for size in listed):
        limit = f"must be a list of 1 to {_MOST_DIMENSIONS} whole numbers in [1, {2**20}]"
        raise CheckpointError(f"{path}: matryoshka_dimensions = {shown(listed)}: {limit}")
    return tuple(listed)
