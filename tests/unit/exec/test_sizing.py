"""What memory the arena gets (jswa/exec/sizing.py)."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from jswa.cache.capacity import useful_blocks
from jswa.config import EngineConfig, Limits
from jswa.exec.backends import PORTABLE
from jswa.exec.sizing import claim_memory, free_bytes, scratch_bytes, size_arena
from tests.support.fakes import make_layout
from tests.support.oracles import small_engine_parts


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


@pytest.mark.parametrize(
    ("options", "on_gpu", "prefix_cache", "all_of_it"),
    [
        ({}, False, True, False),
        ({}, True, True, True),
        ({"kv_cache_memory_bytes": 1}, False, True, True),
        ({"kv_cache_memory_bytes": 1}, True, False, False),
    ],
)
def test_the_prefix_cache_has_what_rows_do_not_need(
    options: dict[str, int], on_gpu: bool, prefix_cache: bool, all_of_it: bool
) -> None:
    """Given bytes and a GPU's are all taken; of a CPU's no more than rows need, where nobody says how many."""
    layout = make_layout(4, 10, num_full=1, num_local=3)
    limits = Limits(64, 4, 16, 4, prefix_cache=prefix_cache)
    useful = useful_blocks(layout, limits)
    memory = 10 * useful * layout.block_bytes(4)
    found = size_arena(limits, layout, EngineConfig(**options), memory, 4, on_gpu=on_gpu)  # type: ignore[arg-type]
    assert found.num_blocks == (10 * useful if all_of_it else useful)


def test_scratch_holds_logits_at_least() -> None:
    """float32, of all rows."""
    model, params, layout, limits, _ = small_engine_parts()
    one_step = dataclasses.replace(limits, one_bucket=True)
    assert (
        scratch_bytes(model, params, layout, one_step, PORTABLE, jnp.dtype("float32"))
        >= 4 * limits.max_rows * model.vocab_size
    )
