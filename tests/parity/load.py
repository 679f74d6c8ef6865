"""Read a parity fixture back, without torch or transformers.

What: `load_fixture(name)` gives the config as a checkpoint folder would hold it, the tensors (drawn
again from the stored seed), the tokens, and the logits that transformers computes.

Why: the engine's tests compare with the reference implementation, but must run without it.

Regenerate with `make parity` (see make_fixtures.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.weights import Tensor, fingerprint, random_weights

FIXTURES = Path(__file__).parent / "fixtures"
ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Fixture:
    """One tiny checkpoint and what transformers makes of it."""

    name: str
    config: dict[str, Any]  # config.json as transformers 5.23 saves it
    old_config: dict[str, Any] | None  # the same model in the form of older hub repositories
    prompt: NDArray[np.int32]  # [P]
    tokens: NDArray[np.int32]  # [T] the prompt and then greedy tokens
    logits: NDArray[np.float32]  # [T, V] one full forward over `tokens`
    tensors: dict[str, Tensor]  # the checkpoint, by its names on disk

    def configs(self) -> dict[str, dict[str, Any]]:
        """Every stored form of the config; all of them must give the same logits."""
        return {"v5": self.config} | ({} if self.old_config is None else {"old": self.old_config})


@dataclass(frozen=True)
class FixtureAdapter:
    """A LoRA adapter on a fixture's checkpoint, and what PEFT makes of both."""

    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, Tensor]  # by their names on disk
    logits: NDArray[np.float32]  # [T, V] over the fixture's tokens


def adapter_names() -> list[str]:
    """The fixtures that have an adapter, sorted."""
    return sorted(path.parent.name for path in ADAPTERS.glob("*/expected.npz"))


def load_adapter(name: str) -> FixtureAdapter:
    """The adapter of a fixture; fail as `load_fixture` does."""
    with np.load(ADAPTERS / name / "expected.npz") as data:
        stored: dict[str, NDArray[Any]] = dict(data)
    shapes = {key: tuple(shape) for key, shape in json.loads(str(stored["shapes"])).items()}
    tensors = random_weights(shapes, {}, int(stored["seed"]), json.loads(str(stored["scales"])))
    if not np.allclose(fingerprint(tensors), stored["fingerprint"], rtol=1e-5):
        raise RuntimeError(f"{name}: NumPy {np.__version__} draws other weights than the adapter was made with")
    return FixtureAdapter(_read_json(ADAPTERS / name / "adapter_config.json"), tensors, stored["logits"])


def names() -> list[str]:
    """All fixtures, sorted."""
    return sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))


def load_fixture(name: str) -> Fixture:
    """Read one fixture; fail if this NumPy does not draw the weights the logits came from."""
    folder = FIXTURES / name
    with np.load(folder / "expected.npz") as data:
        stored: dict[str, NDArray[Any]] = dict(data)
    shapes = {key: tuple(shape) for key, shape in json.loads(str(stored["shapes"])).items()}
    means = dict(zip(stored["names"].tolist(), stored["means"].tolist(), strict=True))
    scales = json.loads(str(stored["scales"])) if "scales" in stored else ()
    tensors = random_weights(shapes, means, int(stored["seed"]), scales)
    for copy, source in json.loads(str(stored["copies"])).items():
        tensors[copy] = tensors[source].copy()
    if not np.allclose(fingerprint(tensors), stored["fingerprint"], rtol=1e-5):
        raise RuntimeError(
            f"{name}: NumPy {np.__version__} draws other weights than the fixture was made with; "
            "run `make parity` with tests/parity/requirements-parity.txt"
        )
    return Fixture(
        name=name,
        config=_read_json(folder / "config.json"),
        old_config=_read_json(old) if (old := folder / "config.old.json").exists() else None,
        prompt=stored["prompt"],
        tokens=stored["tokens"],
        logits=stored["logits"],
        tensors=tensors,
    )


def _read_json(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config
