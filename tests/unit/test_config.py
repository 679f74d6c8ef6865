"""Options of the engine, and the limits made of them (jswa/config.py)."""

import math
from pathlib import Path
from typing import Any

import pytest

from jswa.architecture import Reach
from jswa.commands.options.sizes import folder_and_bytes
from jswa.config import EngineConfig, Limits, resolve_limits
from jswa.errors import ConfigError
from tests.support.builders import make_layer, make_model

MODEL = make_model(make_layer(8, (1, 2, 2)), max_position=4096)
WHOLE = [0, -1, 1.5, "64", True, math.nan]
BAD: dict[str, list[Any]] = {
    "max_model_len": [*WHOLE, 1],
    "max_num_seqs": WHOLE,
    "max_num_batched_tokens": WHOLE,
    "block_size": WHOLE,
    "kv_cache_memory_bytes": WHOLE,
    "dtype": ["int8", "float64", None, 32],
    "kv_cache_dtype": ["int8", "fp8_e5m2", None],
    "quantization": ["awq", None, 8],
    "load_format": ["pickle", None],
    "kernels": ["flash", "", None, ["xla"], "experts=cuda"],
    "gpu_memory_utilization": [0.0, -0.1, 1.01, math.nan],
    "cudagraph_capture_sizes": [(0,), (1.5,), (True,), ("64",), [64], 64, None],
    "seed": [-1, 2**63, 1.0, True, None],
    "prefix_cache": [1, "yes", None],
    "prefix_cache_interval": WHOLE,
    "radix_eviction_policy": ["lfu", "LRU", "", None, 1],
    "host_kv_bytes": [-1, 1.5, "64", True, None],
    "disk_kv": ["", "/kv", ":5", "/kv:", "/kv:0", "/kv:-1", "/kv:1e9", "/kv: 5", 5, True],
    "max_loras": [*WHOLE, 65],
    "max_lora_rank": [*WHOLE, 257],
    "lora_experts": [1, "yes", None, True],  # there is no room that could be for experts
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_a_bad_option_is_refused_by_name_and_value(name: str, value: Any) -> None:
    """Before a model is loaded."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{name: value})
    assert refused.value.field == name
    assert refused.value.value is value
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("options", "on_gpu", "want"),
    [
        ({}, False, Limits(4096, max_rows=16, max_tokens=512, page_size=16)),
        ({}, True, Limits(4096, max_rows=256, max_tokens=2048, page_size=64)),
        ({"max_model_len": 100}, False, Limits(100, max_rows=16, max_tokens=100, page_size=16)),
        ({"max_model_len": 2}, False, Limits(2, max_rows=16, max_tokens=16, page_size=16)),
        ({"max_num_seqs": 700}, False, Limits(4096, max_rows=700, max_tokens=700, page_size=16)),
        ({"block_size": 4, "max_num_batched_tokens": 20}, False, Limits(4096, 16, max_tokens=20, page_size=4)),
    ],
)
def test_options_that_are_not_given_fit_the_others(options: dict[str, Any], on_gpu: bool, want: Limits) -> None:
    """A step has at least one token for every row."""
    limits = resolve_limits(EngineConfig(**options), MODEL, on_gpu=on_gpu)
    assert limits == want
    assert limits.max_rows <= limits.max_tokens


@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [
        ({"max_model_len": 4097}, "max_model_len", "4096"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 31}, "max_num_batched_tokens", "32"),
        ({"cudagraph_capture_sizes": (8, 512)}, "cudagraph_capture_sizes", "max_num_seqs = 16"),
        ({"cudagraph_capture_sizes": (8, 16)}, "cudagraph_capture_sizes", "max_num_batched_tokens = 512"),
        ({"cudagraph_capture_sizes": (16, 512, 513)}, "cudagraph_capture_sizes", "at most max_num_batched_tokens"),
    ],
)
def test_options_that_contradict_the_model_or_each_other_are_refused(
    options: dict[str, Any], field: str, limit: str
) -> None:
    """The error names a number that would be accepted."""
    with pytest.raises(ConfigError) as refused:
        resolve_limits(EngineConfig(**options), MODEL, on_gpu=False)
    assert refused.value.field == field
    assert limit in refused.value.limit


def test_one_batch_shape_has_no_sizes() -> None:
    """Two options that contradict each other are refused before a model is read."""
    with pytest.raises(ConfigError, match="deterministic = True"):
        EngineConfig(cudagraph_capture_sizes=(16, 512), deterministic=True)


def test_a_model_with_one_position_is_refused() -> None:
    """It cannot hold a prompt and a generated token."""
    with pytest.raises(ConfigError, match="at least 2"):
        resolve_limits(EngineConfig(), make_model(make_layer(8, (1, 2, 2)), max_position=1), on_gpu=False)


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (16, 1), (17, 2), (4096, 256)])
def test_a_page_table_is_as_wide_as_the_longest_row(length: int, pages: int) -> None:
    """Rounded up to whole pages."""
    assert Limits(length, 1, 1, page_size=16).pages_per_row == pages


def test_a_model_knows_its_window_and_kinds() -> None:
    """Layers with a window are local; a model without such layers has no window."""
    full, local = make_layer(None, (1, 2, 2)), make_layer(8, (1, 2, 2))
    assert (full.attention.kind, local.attention.kind) == ("full", "local")
    assert (full.attention.reach, local.attention.reach) == (None, Reach(8))
    assert hash(make_model(full, local)) == hash(make_model(full, local))


@pytest.mark.parametrize("other", [{"prefix_cache": False}, {"nnodes": 2}])
def test_host_memory_needs_a_prefix_cache_on_one_host(other: dict[str, Any]) -> None:
    """Other combinations are refused by name."""
    with pytest.raises(ConfigError, match="host_kv_bytes"):
        EngineConfig(host_kv_bytes=2**30, **other)


def test_files_need_host_memory_before_them() -> None:
    """A folder has a path, which may contain colons, and a size."""
    with pytest.raises(ConfigError, match="disk_kv") as refused:
        EngineConfig(disk_kv="/kv:5")
    assert "host_kv_bytes" in str(refused.value)
    assert folder_and_bytes("disk_kv", EngineConfig(disk_kv="/a:b/kv:1000", host_kv_bytes=1).disk_kv) == (
        Path("/a:b/kv"),
        1000,
    )
    assert folder_and_bytes("disk_kv", EngineConfig(disk_kv="/kv:1.5GiB", host_kv_bytes=1).disk_kv) == (
        Path("/kv"),
        3 * 2**29,
    )
