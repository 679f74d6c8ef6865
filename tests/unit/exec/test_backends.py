"""The kernels that are chosen for a device (jswa/exec/backends.py)."""

import importlib.util
import json
import logging
import os
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import EngineConfig, Limits
from jswa.errors import ConfigError
from jswa.exec.backends import Backends, choose_backends, computes_rows_alone
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import compile_step
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import state_shapes
from jswa.model.hf.config import parse_config
from jswa.model.weights import load
from jswa.model.weights.formats import QuantizationMode
from pallas_kernels.attention.hopper.call import plan_of as attention_plan
from pallas_kernels.cpu import library
from pallas_kernels.experts.hopper.call import plan_of as experts_plan
from pallas_kernels.experts.hopper.plan import Shape
from pallas_kernels.ptxas import Ptxas, find_ptxas, prefer_packaged
from tests.parity.load import load_fixture
from tests.support.kernels.calls import shape_of
from tests.support.oracles import random_params, small_model
from tools.cases.kernels.attention_layers import LAYERS
from tools.cases.kernels.attention_shapes import arguments

OPTIONS = ("attention_backend", "moe_backend", "linear_backend", "glue_backend", "sampling_backend")


@pytest.mark.parametrize(
    ("device", "dtype", "want"),
    [
        (("cpu", None), "float32", Backends("cpu", "cpu", None, "cpu", "cpu")),
        (("cpu", None), "float16", Backends("cpu", "cpu", None, "cpu", "cpu")),
        (("gpu", "9.0"), "bfloat16", Backends("mosaic", "mosaic", glue="mosaic", sampling="triton", routing="triton")),
        (("gpu", "9.0"), "float32", Backends("triton", "xla", sampling="triton")),
        (("gpu", "8.0"), "bfloat16", Backends("triton", "xla", sampling="triton")),
        (("gpu", "10.0"), "float16", Backends("triton", "xla", sampling="triton")),
        (("gpu", "7.5"), "float16", Backends("xla", "xla")),
    ],
)
def test_the_default_backends_of_devices(
    device: tuple[str, str | None], dtype: str, want: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Hopper GPUs have WGMMA, not newer ones. Every package is installed here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(library, "digest", lambda: "built")
    assert choose_backends(EngineConfig(), jnp.dtype(dtype), *device) == want


@pytest.mark.parametrize(
    ("quantization", "stored", "converted", "mxfp4"),
    [
        ("auto", "mxfp4", False, True),
        ("auto", "fp8", False, False),
        ("auto", None, False, False),
        ("auto", "mxfp4", True, False),
        ("mxfp4", None, False, True),
        ("none", "mxfp4", False, False),
    ],
)
def test_experts_in_mxfp4_are_unpacked_meanwhile(
    quantization: QuantizationMode,
    stored: str | None,
    converted: bool,
    mxfp4: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper, if no other kernel is named: gates and ups of 256 tokens take an H200 147 µs, 196 with "mosaic"."""
    config = {} if stored is None else {"quantization_config": {"quant_method": stored}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(load, "is_converted", lambda folder: converted)
    assert load.holds_mxfp4(tmp_path, quantization) == mxfp4
    given = jnp.dtype("bfloat16"), "gpu", "9.0"
    assert choose_backends(EngineConfig(), *given, mxfp4=mxfp4).experts == ("mosaic_overlap" if mxfp4 else "mosaic")
    assert choose_backends(EngineConfig(moe_backend="mosaic"), *given, mxfp4=mxfp4).experts == "mosaic"


def test_a_cpu_without_the_library_runs_xla(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log says why; the library's kernels are an error if they are named."""

    def missing() -> str:
        raise library.NoLibrary("it is not built: make")

    monkeypatch.setattr(library, "digest", missing)
    float32 = jnp.dtype("float32")
    with caplog.at_level(logging.INFO, "jswa"):
        assert choose_backends(EngineConfig(), float32, "cpu", None) == Backends("xla", "xla")
    assert "plain XLA runs on this CPU, which is slower than the library of CPU kernels: it is not built" in caplog.text
    for option in OPTIONS:
        named: dict[str, Any] = {option: "cpu"}
        with pytest.raises(ConfigError, match=f"{option} = 'cpu': it is not built: make, or choose xla"):
            choose_backends(EngineConfig(**named), float32, "cpu", None)


def test_kernels_of_the_cpu_are_for_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a GPU or several devices they are an error; automatic, several devices run XLA."""
    monkeypatch.setattr(library, "digest", lambda: "built")
    float32 = jnp.dtype("float32")
    several: dict[str, Any] = {"tensor_parallel_size": 2}
    assert choose_backends(EngineConfig(**several), float32, "cpu", None) == Backends("xla", "xla")
    for option in OPTIONS:
        named: dict[str, Any] = {option: "cpu"}
        with pytest.raises(ConfigError, match=f"{option} = 'cpu': this device is a gpu"):
            choose_backends(EngineConfig(**named), float32, "gpu", "7.0")
        with pytest.raises(ConfigError, match=f"{option} = 'cpu': is for one device"):
            choose_backends(EngineConfig(**named, **several), float32, "cpu", None)


def test_a_deterministic_engine_on_a_cpu_adds_by_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then rows are computed alone, unless XLA multiplies by some matrix, or does another part."""
    monkeypatch.setattr(library, "digest", lambda: "built")
    given, same = (jnp.dtype("float32"), "cpu", None), EngineConfig(deterministic=True)
    chosen = choose_backends(same, *given)
    assert (chosen.sampling, chosen.sums) == ("cpu", "cpu")
    assert choose_backends(EngineConfig(), *given).sums == "xla"
    assert choose_backends(same, given[0], "gpu", "9.0").sums == "xla"
    params = {
        "embed": jnp.ones((8, 4)),
        "layers.0.mlp.down": jnp.ones((1, 4, 32)),
        "layers.0.mlp.up_bias": jnp.ones((2, 4)),
    }
    model = small_model("L")
    assert computes_rows_alone(chosen, params, model)
    assert computes_rows_alone(chosen._replace(glue="xla"), params, model), "norms add by what `sums` says"
    assert not computes_rows_alone(chosen, {**params, "layers.0.mlp.down.lora_a": jnp.ones((4, 2))}, model)
    others = chosen._replace(attention="xla"), chosen._replace(experts="xla"), chosen._replace(linear="xla")
    for other in (*others, chosen._replace(sampling="xla")):
        assert not computes_rows_alone(other, params, model)


HOPPER_ALONE: dict[str, Any] = {"linear_backend": "mosaic", "glue_backend": "mosaic"}


def test_a_deterministic_engine_on_hopper_adds_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both are named; sums along rows are Triton's then, as its sampling is. Keys are not split in any case."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    given = jnp.dtype("bfloat16"), "gpu", "9.0"
    chosen = choose_backends(EngineConfig(deterministic=True, **HOPPER_ALONE), *given)
    assert (chosen.attention, chosen.experts, chosen.sums) == ("mosaic_whole", "mosaic", "triton")
    assert choose_backends(EngineConfig(**HOPPER_ALONE), *given).sums == "xla"
    assert choose_backends(EngineConfig(**HOPPER_ALONE), *given).attention == "mosaic"
    for option in HOPPER_ALONE:
        fewer = choose_backends(EngineConfig(deterministic=True, **HOPPER_ALONE | {option: "auto"}), *given)
        assert (fewer.attention, fewer.sums) == ("mosaic_whole", "xla")
        assert not computes_rows_alone(fewer, {}, small_model("L"))
    model = small_model("LF", d_model=128)
    params = {"embed": jnp.ones((128, 128)), "layers.0.mlp.down": jnp.ones((64, 128))}
    assert computes_rows_alone(chosen, params, model)
    for more in (
        {"embed": jnp.ones((100, 128))},
        {"lm_head": jnp.ones((128, 100))},
        {"layers.0.mlp.shared_gate": jnp.ones((128, 1))},
    ):
        assert not computes_rows_alone(chosen, {**params, **more}, model)
    assert not computes_rows_alone(chosen._replace(routing="triton"), params, model)


@pytest.mark.parametrize("attention", ["mosaic", "mosaic_splits", "triton"])
def test_kernels_that_split_keys_by_the_step_are_not_deterministic(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what is, and what is chosen if nothing is named."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    options, half = EngineConfig(deterministic=True, attention_backend=attention), jnp.dtype("bfloat16")
    whole = f"{attention.partition('_')[0]}_whole"
    with pytest.raises(ConfigError, match=f"attention_backend = '{attention}': .* must be {whole} if deterministic"):
        choose_backends(options, half, "gpu", "9.0")
    capability = "8.0" if attention == "triton" else "9.0"
    assert choose_backends(EngineConfig(deterministic=True), half, "gpu", capability).attention == whole


@pytest.mark.parametrize("part", ["sampling", "routing"])
def test_kernels_on_triton_are_for_one_gpu_since_ampere(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """With jax-triton. Elsewhere they are an error if they are named, and XLA's otherwise."""
    given = jnp.dtype("bfloat16"), "gpu", "8.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_backends(EngineConfig(), *given).sampling == "triton"
    assert choose_backends(EngineConfig(tensor_parallel_size=2), *given).sampling == "xla"
    assert choose_backends(EngineConfig(), given[0], "gpu", "7.5").sampling == "xla"
    named: dict[str, Any] = {f"{part}_backend": "triton"}
    assert getattr(choose_backends(EngineConfig(**named), *given), part) == "triton"
    with pytest.raises(ConfigError, match=rf"{part}_backend = 'triton': .* compute capability 7\.5"):
        choose_backends(EngineConfig(**named), given[0], "gpu", "7.5")
    with pytest.raises(ConfigError, match=f"{part}_backend = 'triton': is for one device"):
        choose_backends(EngineConfig(**named, tensor_parallel_size=2), *given)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{part}_backend = 'triton': needs jax-triton"):
        choose_backends(EngineConfig(**named), *given)
    assert choose_backends(EngineConfig(), *given).sampling == "xla"


def test_experts_run_on_triton_only_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one NVIDIA GPU since Ampere, with jax-triton; never on a CPU."""
    half, named = jnp.dtype("bfloat16"), EngineConfig(moe_backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for capability in ("8.0", "8.9", "9.0", "10.0"):
        assert choose_backends(EngineConfig(), half, "gpu", capability).experts != "triton"
        assert choose_backends(named, half, "gpu", capability).experts == "triton"
    both = EngineConfig(moe_backend="triton", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="moe_backend = 'triton': is for one device"):
        choose_backends(both, half, "gpu", "8.0")
    for device in (("gpu", "7.5"), ("cpu", None)):
        with pytest.raises(ConfigError, match=f"moe_backend = 'triton': this device is a {device[0]}"):
            choose_backends(named, half, *device)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="moe_backend = 'triton': needs jax-triton"):
        choose_backends(named, half, "gpu", "8.0")


def test_8_bit_factors_are_multiplied_only_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVIDIA GPUs since Ada, one or several, and by a CPU, whose library has no part in it."""
    half, named = jnp.dtype("bfloat16"), EngineConfig(linear_backend="fp8", tensor_parallel_size=2)
    for capability in ("8.9", "9.0", "10.0"):
        assert choose_backends(EngineConfig(), half, "gpu", capability).linear == "xla"
        assert choose_backends(named, half, "gpu", capability).linear == "fp8"
    for older in ("8.0", "8.6", None):
        with pytest.raises(ConfigError, match=f"linear_backend = 'fp8': .* compute capability {older}: must be"):
            choose_backends(named, half, "gpu", older)
    monkeypatch.setattr(library, "digest", lambda: "built")
    assert choose_backends(named, half, "cpu", None).linear == "fp8"


def test_linear_layers_run_on_mosaic_only_if_they_are_named() -> None:
    """On Hopper, one device or several, in bfloat16, with a compiler that is not known to be wrong."""
    half, named = jnp.dtype("bfloat16"), EngineConfig(linear_backend="mosaic", tensor_parallel_size=2)
    assert choose_backends(EngineConfig(), half, "gpu", "9.0").linear == "xla"
    assert choose_backends(named, half, "gpu", "9.0").linear == "mosaic"
    for device in (("gpu", "8.0"), ("gpu", "10.0"), ("cpu", None)):
        with pytest.raises(ConfigError, match=f"linear_backend = 'mosaic': this device is a {device[0]}, .* Hopper"):
            choose_backends(named, half, *device)
    with pytest.raises(ConfigError, match="linear_backend = 'mosaic': dtype is float16: must be xla, or dtype must be"):
        choose_backends(named, jnp.dtype("float16"), "gpu", "9.0")
    others = EngineConfig(linear_backend="mosaic", attention_backend="xla", moe_backend="xla")
    with pytest.raises(ConfigError, match=r"linear_backend = 'mosaic': ptxas 12\.8\.93 .* gives wrong code"):
        choose_backends(others, half, "gpu", "9.0", compiler=Ptxas("/x/ptxas", (12, 8, 93)))


def test_kernels_are_planned_for_the_multiprocessors_of_the_device() -> None:
    """An H20 has 78, an H200 132: experts start as many thread blocks as run at once; splits fill them."""
    chosen = choose_backends(EngineConfig(), jnp.dtype("bfloat16"), "gpu", "9.0", 78)
    assert chosen[:3] == ("mosaic", "mosaic", 78)
    attention = shape_of(arguments(next(layer for layer in LAYERS if layer.name == "gpt-oss-20b full, one row")))
    assert attention_plan(attention, 78).tuning.splits < attention_plan(attention, 132).tuning.splits
    bfloat16 = jnp.dtype("bfloat16")
    experts = Shape(256, 32, 2880, 2880, bfloat16, None, bias=False, held="plain")
    assert experts_plan(experts, 78).blocks in (78, 156)


@pytest.mark.parametrize(
    ("version", "options", "refused"),
    [
        ((12, 8, 93), {}, "attention_backend"),
        ((12, 9, 41), {"attention_backend": "xla"}, "moe_backend"),
        ((12, 9, 41), {"attention_backend": "xla", "moe_backend": "xla"}, None),
        ((12, 9, 86), {}, None),
        ((13, 5, 37), {}, None),
    ],
)
def test_a_compiler_that_gives_wrong_code_is_refused(
    version: tuple[int, ...], options: dict[str, Any], refused: str | None
) -> None:
    """By name, path and version, and no other kernel is taken without a word."""
    arguments = EngineConfig(**options), jnp.dtype("bfloat16"), "gpu", "9.0", 132, Ptxas("/x/ptxas", version)
    if refused is None:
        choose_backends(*arguments)
        return
    with pytest.raises(
        ConfigError, match=rf"ptxas {'.'.join(map(str, version))} \(/x/ptxas\) gives wrong code"
    ) as error:
        choose_backends(*arguments)
    assert error.value.field == refused


def test_the_ptxas_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is read as XLA reads it."""
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ptxas() == Ptxas(str(ptxas), (12, 9, 41))
    assert Ptxas(str(ptxas), (12, 9, 41)).is_wrong


def test_the_packaged_ptxas_comes_before_that_of_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic takes the first on PATH, where an older CUDA may lie; CUDA_ROOT is a wish that is kept."""
    for name, version in (("installed", "12.8.93"), ("nvidia/cu13", "13.5.37"), ("wished", "13.4.1")):
        ptxas = tmp_path / name / "bin" / "ptxas"
        ptxas.parent.mkdir(parents=True)
        ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n")
        ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "installed" / "bin"))
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec_of(tmp_path / name.replace(".", "/")))
    assert (found := find_ptxas()) is not None
    assert found.version == (12, 8, 93)
    for root, wanted in ((None, (13, 5, 37)), (tmp_path / "wished", (13, 4, 1))):
        if root is not None:
            monkeypatch.setenv("CUDA_ROOT", str(root))
        prefer_packaged()
        prefer_packaged()
        assert (found := find_ptxas()) is not None
        assert found.version == wanted
    assert os.environ["PATH"].count("installed") == 1


def spec_of(folder: Path) -> ModuleSpec | None:
    """Return the spec of a package in a folder, if there is one."""
    if not folder.is_dir():
        return None
    spec = ModuleSpec(folder.name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


def test_a_gpu_without_kernels_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain XLA works there, but it is slow."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "jswa"):
        chosen = choose_backends(EngineConfig(), jnp.dtype("bfloat16"), "gpu", "8.0")
    assert chosen == Backends("xla", "xla")
    assert "jax-triton is not installed" in caplog.text


@pytest.mark.parametrize("options", [{"attention_backend": "mosaic"}, {"moe_backend": "mosaic"}])
def test_a_backend_given_by_option_is_used(options: dict[str, Any]) -> None:
    """On any device."""
    chosen = choose_backends(EngineConfig(**options), jnp.dtype("float32"), "cpu", None)
    assert "mosaic" in chosen


def test_a_backend_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option and the package to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="attention_backend = 'triton': needs jax-triton"):
        choose_backends(EngineConfig(attention_backend="triton"), jnp.dtype("bfloat16"), "gpu", "8.0")


@pytest.mark.parametrize("option", ["attention_backend", "moe_backend"])
def test_a_model_that_a_kernel_does_not_support_is_refused_with_the_option(option: str) -> None:
    """Here float32, without any GPU: kernels are traced before they are compiled."""
    model = parse_config(load_fixture("gpt_oss_base").config)
    layout, limits = KVLayout.of(model, 16), Limits(64, 2, 16, page_size=16, num_blocks=9)
    bucket = Bucket(2, 2, decode=True)
    spec = PackSpec.of(bucket, page_size=16, max_rows=2, targets=False)
    backends = Backends(attention="mosaic") if option == "attention_backend" else Backends(experts="mosaic")
    config = StepConfig(model, layout, bucket, spec, backends)
    state = state_shapes(layout, limits, model.vocab_size, jnp.dtype("float32"))
    with pytest.raises(ConfigError, match=f"{option} = 'mosaic': "):
        compile_step(config, random_params(model), state)
