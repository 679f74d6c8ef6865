"""One engine for all tests of this folder, and weights for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jswa

TINY = Path(jswa.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="package")
def weights() -> list[dict[str, Any]]:
    """Return the model's weights, and two others near them."""
    stored = load_file(TINY / "model.safetensors")
    rng = np.random.default_rng(0)

    def near(value: np.ndarray) -> Any:
        noise = 1 + 0.1 * rng.standard_normal(value.shape)
        return jnp.asarray(value.astype(np.float32) * noise.astype(np.float32))

    return [stored, *({name: near(value) for name, value in stored.items()} for _ in range(2))]


@pytest.fixture(scope="package")
def shared() -> Iterator[jswa.LLM]:
    """Yield a deterministic LLM, whose tokens depend on the weights alone; its steps are small."""
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with jswa.LLM("tiny", deterministic=True, dtype="float32", **options) as llm:
        yield llm


@pytest.fixture
def llm(shared: jswa.LLM, weights: list[dict[str, Any]]) -> jswa.LLM:
    """Return the LLM with the model's own weights."""
    if shared.weights_version:
        shared.update_weights(weights[0])
    return shared
