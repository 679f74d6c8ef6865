"""What memory the arena gets (jswa/sizing.py)."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from jswa.exec.backends import PORTABLE
from jswa.sizing import claim_memory, free_bytes, scratch_bytes
from tests.oracles import small_engine_parts


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_environment_decides_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax refuses to start where both names are set."""
    for each in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0.5")
    claim_memory(0.9)
    assert [os.environ.get(each) for each in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")].count(
        None
    ) == 1
    assert os.environ[name] == "0.5"
    monkeypatch.delenv(name)
    claim_memory(0.9)
    assert os.environ.pop("XLA_CLIENT_MEM_FRACTION") == "0.9"


def test_a_cpu_gives_a_quarter_of_its_memory() -> None:
    """At most 4 GiB."""
    assert 2**20 < free_bytes(jax.devices()[:1]) <= 4 * 2**30


def test_scratch_holds_logits_at_least() -> None:
    """float32, of all rows."""
    model, params, layout, limits, _ = small_engine_parts()
    one_step = dataclasses.replace(limits, one_bucket=True)
    assert (
        scratch_bytes(model, params, layout, one_step, PORTABLE, jnp.dtype("float32"))
        >= 4 * limits.max_rows * model.vocab_size
    )
