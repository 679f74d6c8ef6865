"""The memory that the arena gets (jswa/exec/sizing.py)."""

import dataclasses
import logging
import os
from functools import partial
from typing import Any

import jax.numpy as jnp
import jaxtyping
import pytest

from jswa.cache.capacity import useful_slabs
from jswa.cache.layout import KVLayout
from jswa.config import EngineConfig, Limits, resolve_limits
from jswa.errors import ConfigError
from jswa.exec.buckets import bucket_table
from jswa.exec.runner import Runner
from jswa.exec.sizing import (
    claim_memory,
    free_bytes,
    gpu_step,
    most_logits,
    require_memory,
    require_room,
    scratch_bytes,
    size_arena,
    table_bytes,
    weight_bytes,
)
from jswa.kernels import PORTABLE, Kernels
from jswa.model.hf.config import parse_config
from jswa.model.partition import shard_config
from jswa.model.weights.lora.files import room_bytes
from jswa.options.lora import LoraRoom
from jswa.speculation import Speculation
from tests.parity.load import load_fixture
from tests.support.builders import make_layer, make_layout, make_model
from tests.support.oracles import small_engine_parts
from tools.cases.hub_configs import CONFIGS


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_environment_overrides_the_memory_fraction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of the two variables is set: jax refuses to start with both."""
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


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device by its platform and what it reports about its memory."""

    platform: str
    bytes_limit: int = 0
    bytes_in_use: int = 0
    largest_free_block_bytes: int = 0
    pool_bytes: int = 0

    def memory_stats(self) -> dict[str, int]:
        stats = {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}
        if self.pool_bytes:
            stats |= {"pool_bytes": self.pool_bytes, "largest_free_block_bytes": self.largest_free_block_bytes}
        return stats


@dataclasses.dataclass(frozen=True)
class FakeGpu(FakeDevice):
    """A GPU by the kind that errors name."""

    device_kind: str = "a GPU"


@pytest.mark.parametrize("devices", [1, 2])
def test_the_room_for_adapters_counts_as_weights(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits to the byte on each device. With two, matrices are split and what all tokens share is not."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    model = parse_config(load_fixture("llama_one_layer").config)
    options = EngineConfig(max_loras=2, max_lora_rank=8, tensor_parallel_size=devices)
    weights = weight_bytes(shard_config(model, devices), None, "none", "float32")
    require = partial(require_memory, model, None, options, "none", "float32", kernels=Kernels())
    room = room_bytes(model, LoraRoom(2, 8), 4, devices)
    require(FakeGpu("gpu", weights + room))
    with pytest.raises(ConfigError, match="its weights and the room for adapters take"):
        require(FakeGpu("gpu", weights + room - 1))


def test_the_tower_counts_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the type of the activations; the error says how to do without it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    model = parse_config(load_fixture("llama_one_layer").config)
    weights = weight_bytes(model, None, "none", "float32")
    require = partial(require_memory, model, None, EngineConfig(), "none", "float32", kernels=Kernels())
    require(FakeGpu("gpu", weights), tower=lambda dtype: 0)
    require(FakeGpu("gpu", weights + 40), tower=lambda dtype: 10 * jnp.dtype(dtype).itemsize)
    with pytest.raises(ConfigError, match=r"choose --dtype bfloat16 .*, --language-model-only, a smaller model"):
        require(FakeGpu("gpu", weights + 39), tower=lambda dtype: 10 * jnp.dtype(dtype).itemsize)
    with pytest.raises(ConfigError, match="a smaller model") as error:
        require(FakeGpu("gpu", weights - 1), tower=lambda dtype: 0)
    assert "--language-model-only" not in str(error.value)


def test_weights_that_do_not_fit_in_float32_name_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what they take then. In 16 bits it does not name what they have already."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    model = dataclasses.replace(parse_config(load_fixture("llama_one_layer").config), vocab_size=2**22)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match=f"GiB in {dtype} on 1 device, ") as error:
            require_memory(model, None, EngineConfig(), "none", dtype, FakeGpu("gpu", 1), Kernels())
        half = weight_bytes(model, None, "none", "bfloat16") / 2**30
        assert (f"choose --dtype bfloat16 ({half:.1f} GiB), a smaller model" in str(error.value)) == (
            dtype == "float32"
        )


@pytest.mark.parametrize(("memory", "devices", "expected"), [(8, 1, 2), (64, 1, 4), (8, 2, 1), (64, 4, 1)])
def test_cpu_devices_share_a_quarter_of_the_memory_up_to_4_gib(
    memory: int, devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the machine and arena of each device in GiB."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory * 2**30 // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    found: Any = [FakeDevice("cpu")] * devices
    assert free_bytes(found) == expected * 2**30


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}, {"bytes_limit": 5}])
@pytest.mark.parametrize("allocator", [None, "platform"])
def test_a_device_that_does_not_tell_its_memory_needs_an_option(
    stats: dict[str, int] | None, allocator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under XLA_PYTHON_CLIENT_ALLOCATOR=platform: the error names the option to give, and the cause where known."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    if allocator is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    silent: Any = FakeDevice("gpu")
    monkeypatch.setattr(FakeDevice, "memory_stats", lambda self: stats)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes = None: must be given: gpu does not report") as caught:
        free_bytes([silent])
    assert caught.value.field == "kv_cache_memory_bytes"
    assert ("XLA_PYTHON_CLIENT_ALLOCATOR=platform" in str(caught.value)) == (allocator is not None)


def test_the_fullest_gpu_decides_how_large_the_arena_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % of a device's memory are left for fragmentation and programs."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    found: Any = [FakeDevice("gpu", 100_000, 30_000), FakeDevice("gpu", 100_000, 40_000)]
    assert free_bytes(found) == 58_000


@pytest.mark.parametrize(
    ("block", "pool", "expected"),
    [(70_000, 100_000, 68_000), (50_000, 100_000, 50_000), (0, 100_000, 68_000), (10_000, 50_000, 50_000)],
)
def test_the_arena_is_no_larger_than_the_largest_free_block(
    block: int, pool: int, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lane must lie in one. The log has the numbers; an allocator that tells 0 does not know, a small pool grows."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    found: Any = [FakeDevice("gpu", 100_000, 30_000, block, pool)]
    with caplog.at_level(logging.INFO, "jswa"):
        assert free_bytes(found) == expected
    assert "largest free block" in caplog.text
    assert ("left out of the KV arena" in caplog.text) == (expected < 68_000)


def test_an_arena_that_does_not_fit_is_an_error_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes of 3,200 bytes: into one block each, and into what is free."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    layout = make_layout(4, 10, num_full=2, num_local=2)
    limits = Limits(64, 4, 16, 4, num_slabs=20)
    lane = 20 * layout.slab_elems * 2

    def require(free: int, block: int) -> None:
        found: Any = [FakeDevice("gpu", 10 * lane, 10 * lane - free, block, 10 * lane)]
        require_room(limits, layout, 2, found)

    require(2 * lane, lane)
    for free, block in ((2 * lane, lane - 1), (2 * lane - 1, lane)):
        with pytest.raises(
            ConfigError, match=f"{free} bytes free, {block} of them .* 2 lanes of {lane} bytes"
        ) as error:
            require(free, block)
        assert error.value.field == "kv_cache_memory_bytes"


@pytest.mark.parametrize(("rows", "megabytes"), [(256, 149), (1400, 815)])
def test_tables_of_all_rows_are_counted(rows: int, megabytes: int) -> None:
    """For a vocabulary of 262,144: counts, masks, 1,024 biases, bans; tables of 131,072 tokens, length, last token."""
    layout = make_layout(64, 1024, num_full=1, num_local=1)
    model = make_model(make_layer(None, (1, 2, 2)), vocab=262_144)
    each = 262_144 * 2 + 262_144 // 8 + 1_024 * 8 + 4 * (16 * 9 + 16) + 2 * 4 * 2_048 + 2 * 4
    found = table_bytes(model, layout, Limits(131_072, rows, 8_192, 64))
    assert found == rows * each
    assert round(found / 1e6) == megabytes


@pytest.mark.parametrize(
    ("options", "on_gpu", "rows", "prefix_cache", "room"),
    [
        ({}, False, 3, True, 32),
        ({}, False, 32, True, 32),
        ({}, False, 40, True, 40),
        ({}, False, 3, False, 3),
        ({}, True, 3, True, 100),
        ({"kv_cache_memory_bytes": 1}, False, 3, True, 100),
        ({"kv_cache_memory_bytes": 1}, True, 3, False, 3),
    ],
)
def test_the_prefix_cache_gets_memory_that_rows_do_not_need(
    options: dict[str, int], on_gpu: bool, rows: int, prefix_cache: bool, room: int
) -> None:
    """All memory of the option, or of a GPU, is used; on a CPU without the option, room for 32 rows or all rows.

    `room`: rows that the arena holds at max_model_len, of 100 that the memory holds.
    """
    layout = make_layout(4, 10, num_full=1, num_local=3)
    limits = Limits(64, rows, 16, 4, prefix_cache=prefix_cache)
    of_room = {count: useful_slabs(layout, dataclasses.replace(limits, max_rows=count)) for count in (room, 100)}
    memory = of_room[100] * layout.slab_bytes(4)
    found = size_arena(limits, layout, EngineConfig(**options), memory, 4, on_gpu=on_gpu)  # type: ignore[arg-type]
    assert found.num_slabs == of_room[room]


@pytest.mark.parametrize("rows", [3, 100])
def test_a_cpu_never_takes_more_than_its_memory(rows: int) -> None:
    """Memory that holds fewer requests is used up."""
    layout = make_layout(4, 10, num_full=1, num_local=3)
    memory = 20 * layout.resident_slots(64) // layout.pages_per_slab * layout.slab_bytes(4)
    found = size_arena(Limits(64, rows, 16, 4), layout, EngineConfig(), memory, 4)
    assert found.num_slabs == memory // layout.slab_bytes(4)


@pytest.mark.parametrize(
    ("name", "gigabytes", "memory", "options", "step"),
    [
        ("gpt-oss-20b", 105, 127, {}, (1_024, 8_192)),
        ("gpt-oss-120b", 58, 127, {}, (512, 8_192)),
        ("gemma-3-27b", 65, 127, {}, (256, 2_048)),
        ("Mistral-7B-v0.1", 110, 127, {}, (256, 2_048)),
        ("gpt-oss-20b", 55, 72, {}, (256, 2_048)),
        ("gpt-oss-20b", 105, 127, {"max_num_batched_tokens": 512}, (512, 8_192)),
    ],
)
def test_a_large_gpu_has_larger_steps(
    name: str, gigabytes: int, memory: int, options: dict[str, Any], step: tuple[int, int]
) -> None:
    """As many rows as fit; mixtures run longer chunks. What the options say stays, and rows fit into it."""
    model = parse_config(CONFIGS[name], weights=False)
    layout, config = KVLayout.of(model, 64), EngineConfig(**options)
    assert gpu_step(config, model, layout, gigabytes * 10**9, memory * 10**9, 2) == step
    limits = resolve_limits(config, model, on_gpu=True, gpu_step=step)
    assert (limits.max_rows, limits.max_tokens) == (step[0], options.get("max_num_batched_tokens", step[1]))


@pytest.mark.parametrize(("vocab", "tokens"), [(262_208, [128, 128, 2_048]), (32_000, [512, 2_048])])
def test_scratch_is_measured_with_the_most_logits_that_exist_at_once(vocab: int, tokens: list[int]) -> None:
    """Logits of 64 rows with 7 drafts of a large vocabulary are computed place by place, those of fewer drafts at once.

    For an H200 temporaries of the latter are 638 MB, and of the former 338 MB.
    """
    limits = Limits(4_096, 64, 2_048, 64, speculation=Speculation("suffix", 7).of_length(4_096))
    table = bucket_table(limits, on_gpu=True)
    assert max(bucket.tokens for bucket in table if bucket.drafts and bucket.decode) == 512
    assert [bucket.tokens for bucket in most_logits(table, vocab)] == tokens
    assert len(most_logits(bucket_table(limits, on_gpu=True, tail=True), vocab)) == 1
    assert not most_logits(bucket_table(dataclasses.replace(limits, speculation=None), on_gpu=True), vocab)


def test_no_program_needs_more_scratch_than_was_measured() -> None:
    """Scratch is measured with an arena of two slabs; the programs of this runner have one of 800."""
    model, params, layout, limits, _ = small_engine_parts()
    one_step = dataclasses.replace(limits, one_bucket=True)
    runner = Runner(model, params, layout, one_step, on_gpu=True)
    measured = scratch_bytes(model, params, layout, one_step, PORTABLE, jnp.dtype("float32"))
    memory = [program.memory_analysis() for program in runner.compiled.values()]
    needed = [m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in memory if m is not None]
    assert max(needed) <= measured < 1.5 * max(needed)
