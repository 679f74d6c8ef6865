"""The first stage of an engine: what is known of the device, and how weights are held (jswa/building/machine.py)."""

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from jswa.building import machine
from jswa.building.machine import choose, facts_of
from jswa.config import EngineConfig
from jswa.exec.compile.ptxas import Ptxas
from pallas_kernels.cpu import library
from pallas_kernels.cpu.build import CannotBuild
from pallas_kernels.interpreter import interpreted
from tests.parity.load import read_config
from tests.support.checkpoints.float4 import CONFIGS as CONFIGS_OF_NVFP4
from tests.support.checkpoints.float4 import Layout
from tools.cases.hub_configs import CONFIGS


@dataclass(frozen=True)
class Device:
    """What is read of a device."""

    platform: str
    compute_capability: str | None = None
    core_count: int | None = None


H200: Any = Device("gpu", "9.0", 132)
CPU: Any = Device("cpu")


@pytest.fixture(autouse=True)
def _fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a fake device is no jax.Device
    monkeypatch.setattr(machine, "find_ptxas", lambda: Ptxas("/x/ptxas", (12, 8, 93)))
    monkeypatch.setattr(machine, "why_no_library", cache(machine.why_no_library.__wrapped__))


def test_the_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler if it is known to be wrong, and without jax-triton."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    facts = facts_of(EngineConfig(tensor_parallel_size=2, deterministic=True), H200, packed_experts=True)
    assert facts[:6] == ("gpu", 9.0, "bfloat16", 2, 132, True)
    assert facts.deterministic
    assert facts.wrong_compiler == "ptxas 12.8.93 (/x/ptxas)"
    assert not facts.has_triton
    assert not facts.no_library, "no CPU kernels are looked for"
    monkeypatch.setattr(machine, "find_ptxas", lambda: Ptxas("/x/ptxas", (13, 5, 37)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    facts = facts_of(EngineConfig(), H200)
    assert (facts.wrong_compiler, facts.has_triton) == ("", True)


def test_the_facts_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason for which its library cannot be used."""
    monkeypatch.setattr(machine, "why_no_library", lambda: "")
    assert facts_of(EngineConfig(), CPU)[:6] == ("cpu", None, "float32", 1, None, False)
    assert not facts_of(EngineConfig(), CPU).no_library
    monkeypatch.setattr(machine, "why_no_library", lambda: "why")
    assert facts_of(EngineConfig(dtype="bfloat16"), CPU).no_library == "why"
    with interpreted():
        assert facts_of(EngineConfig(), CPU).interpreted


@pytest.mark.parametrize(
    ("failure", "level", "said"),
    [
        (CannotBuild("no compiler", "install g++"), "WARNING", "no compiler; to mend it, install g++"),
        (CannotBuild("they are written for x86-64 Linux"), "INFO", "they are written for x86-64 Linux"),
        (
            library.NoLibrary("lib.so cannot be loaded"),
            "WARNING",
            "lib.so cannot be loaded; to mend it, delete that file",
        ),
    ],
)
def test_slower_kernels_are_told_once(
    failure: Exception, level: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, if the user can mend it; engines whose kernels are all named try to build nothing."""
    tries = []

    def provide(tell: object) -> None:
        tries.append(tell)
        raise failure

    monkeypatch.setattr(machine, "provide", provide)
    with caplog.at_level("INFO", "jswa"):
        assert not facts_of(EngineConfig(kernels="xla"), CPU).no_library
        assert not facts_of(EngineConfig(tensor_parallel_size=2), CPU).no_library
        assert not tries
        assert [facts_of(EngineConfig(), CPU).no_library for _ in range(2)] == [str(failure)] * 2
    assert len(tries) == 1
    (record,) = caplog.records
    assert record.levelname == level
    assert record.message == f"plain XLA runs, several times slower than the CPU kernels: {said}"


@pytest.mark.parametrize(
    ("quantization", "stored", "converted", "mode", "experts"),
    [
        ("auto", "mxfp4", False, "auto", "mosaic_overlap"),
        ("auto", "fp8", False, "auto", "mosaic"),
        ("auto", None, False, "auto", "mosaic"),
        ("auto", "mxfp4", True, "auto", "mosaic"),
        ("mxfp4", None, False, "mxfp4", "mosaic_overlap"),
        ("none", "mxfp4", False, "none", "mosaic"),
        ("w8a8_fp8", None, False, "fp8", "mosaic"),
        ("w8a8_fp8", "mxfp4", False, "fp8", "mosaic"),
        ("w8a8_fp8", "fp8", False, "auto", "mosaic"),
        ("w8a8_fp8", "blocks", False, "fp8", "mosaic"),
        ("w8a8_fp8", None, True, "auto", "mosaic"),
    ],
)
def test_how_weights_are_held_chooses_kernels(
    quantization: Any,
    stored: str | None,
    converted: bool,
    mode: str,
    experts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MXFP4 is unpacked meanwhile: gates and ups of 256 tokens take an H200 147 µs, 196 with "mosaic".

    Rounded activations need linear layers in fp8: as they are stored, or rounded at load. Scales of blocks do not fit.
    """
    monkeypatch.setattr(machine, "find_ptxas", lambda: None)
    blocks = {"weight_block_size": [128, 128]} if stored == "blocks" else {}
    method = {"quant_method": "fp8" if stored == "blocks" else stored, **blocks}
    config = read_config("gpt_oss_base") | ({} if stored is None else {"quantization_config": method})
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(machine, "is_converted", lambda folder: converted)
    found, kernels = choose(tmp_path, EngineConfig(quantization=quantization), H200)
    assert (found, kernels.experts) == (mode, experts)
    assert (kernels.linear == "fp8") == (quantization == "w8a8_fp8")


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("sides", "more", "experts"),
    [
        (128, {}, "mosaic_overlap"),
        (96, {}, "mosaic"),
        (128, {"ignore": ["re:.*layers.1.*", "*layers.1.*"]}, "mosaic"),
        (128, {"ignore": ["re:.*self_attn.*", "*self_attn*"]}, "mosaic_overlap"),
    ],
)
def test_experts_in_nvfp4_stay_in_4_bits_on_hopper(
    method: Layout, sides: int, more: dict[str, Any], experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all of them are, and can be cut into tiles; else they are widened, as one kernel serves all layers."""
    monkeypatch.setattr(machine, "find_ptxas", lambda: None)
    stored = CONFIGS_OF_NVFP4[method] | more
    config = read_config("mixtral_base") | {"intermediate_size": sides, "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose(tmp_path, EngineConfig(), H200)[1].experts == experts
    assert choose(tmp_path, EngineConfig(quantization="none"), H200)[1].experts == "mosaic"
    assert choose(tmp_path, EngineConfig(dtype="float16"), H200)[1].experts == "mosaic", "unpacked in bfloat16 alone"


@pytest.mark.parametrize(
    ("options", "stored", "alone"),
    [
        ({}, None, True),
        ({}, "mxfp4", True),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, None, True),
        ({"speculative_config": '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2}'}, None, False),
        ({"max_loras": 1}, None, False),
        ({"quantization": "fp8"}, None, False),
        ({"kv_cache_dtype": "fp8"}, None, False),
        ({"dtype": "float16"}, None, False),
        ({"kernels": "linear=xla"}, None, False),
        ({}, "fp8", False),
    ],
)
def test_a_deterministic_engine_on_hopper_is_batch_invariant_if_all_matrices_are_plain(
    options: dict[str, Any], stored: str | None, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts may be in MXFP4. With others, all steps have one batch shape."""
    monkeypatch.setattr(machine, "find_ptxas", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config = CONFIGS["gpt-oss-20b"] | {"quantization_config": {"quant_method": stored}}
    if stored is None:
        del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, kernels = choose(tmp_path, EngineConfig(deterministic=True, **options), H200)
    assert kernels.batch_invariant == alone
