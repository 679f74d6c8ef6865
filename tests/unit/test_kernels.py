"""Which kernels run (jswa/kernels.py): the first of each operation that can, or the named ones."""

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.kernels import (
    OPERATIONS,
    TABLE,
    DeviceFacts,
    Kernel,
    Kernels,
    ServedKernels,
    instead_of,
    kernel_of,
    may_take_library,
    named_in,
    reason_of,
    resolve,
)

CPU = DeviceFacts("cpu", None, "float32")
HOPPER = DeviceFacts("gpu", 9.0, "bfloat16", sms=132)
AMPERE = DeviceFacts("gpu", 8.0, "bfloat16", sms=108)
ON_CPU = Kernels("cpu", "cpu", linear="cpu", elementwise="cpu")
ON_HOPPER = Kernels("mosaic", "mosaic", 132, elementwise="mosaic", sampling="triton", routing="triton")
ON_AMPERE = Kernels("triton", "xla", 108, sampling="triton")
SAME = HOPPER._replace(deterministic=True)
WHOLE = Kernels("mosaic_whole", "mosaic", 132, "mosaic", "mosaic", "triton", "xla", "triton")
NO_LIBRARY = "it is not built: make"
NO_ELEMENTWISE = ServedKernels(
    lambda kernel: "a LayerNorm" if (kernel.operation, kernel.name) == ("elementwise", "mosaic") else None
)


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        (CPU, ON_CPU),
        (CPU._replace(dtype="float16"), ON_CPU),
        (CPU._replace(devices=2), Kernels()),
        (CPU._replace(deterministic=True), ON_CPU._replace(sampling="cpu", sums="cpu")),
        (HOPPER, ON_HOPPER),
        (HOPPER._replace(packed_experts=True), ON_HOPPER._replace(experts="mosaic_overlap")),
        (HOPPER._replace(dtype="float32"), ON_AMPERE._replace(sms=132)),
        (HOPPER._replace(devices=2), Kernels("mosaic", "mosaic", 132)),
        (SAME, WHOLE),
        (SAME._replace(packed_experts=True), WHOLE._replace(experts="mosaic_overlap")),
        (SAME._replace(dtype="float16"), Kernels("mosaic_whole", "mosaic", 132, sampling="triton")),
        (SAME._replace(devices=2), Kernels("mosaic_whole", "mosaic", 132)),
        (SAME._replace(has_triton=False), Kernels("mosaic_whole", "mosaic", 132)),
        (HOPPER._replace(has_triton=False), Kernels("mosaic", "mosaic", 132, elementwise="mosaic")),
        (AMPERE, ON_AMPERE),
        (AMPERE._replace(capability=10.0), ON_AMPERE),
        (AMPERE._replace(deterministic=True), ON_AMPERE._replace(attention="triton_whole")),
        (AMPERE._replace(devices=2), ON_AMPERE._replace(sampling="xla")),
        (AMPERE._replace(capability=7.5), Kernels(sms=108)),
        (AMPERE._replace(has_triton=False), Kernels(sms=108)),
        (AMPERE._replace(capability=8.9, factors_in_8_bits=True), ON_AMPERE._replace(linear="fp8")),
        (CPU._replace(factors_in_8_bits=True), ON_CPU._replace(linear="fp8")),
    ],
)
def test_the_kernels_of_devices(facts: DeviceFacts, want: Kernels) -> None:
    """Only Hopper GPUs have WGMMA, not newer ones."""
    assert resolve("auto", facts) == want


@pytest.mark.parametrize(
    ("asked", "facts", "said"),
    [
        ("attention=cpu", HOPPER, "is for a CPU, and this device is a gpu, compute capability 9.0"),
        ("elementwise=cpu", CPU._replace(devices=2), "is for one device, and tensor_parallel_size is 2"),
        ("linear=cpu", CPU._replace(no_library=NO_LIBRARY), f"needs the library of CPU kernels: {NO_LIBRARY}"),
        ("attention=mosaic", AMPERE, "is for NVIDIA's Hopper (9.0), and this device is a gpu, compute capability 8.0"),
        ("experts=mosaic", HOPPER._replace(dtype="float32"), "is for bfloat16 and float16, and dtype is float32"),
        ("linear=mosaic", HOPPER._replace(dtype="float16"), "is for bfloat16, and dtype is float16"),
        ("experts=mosaic_overlap", HOPPER._replace(dtype="float16"), "is for bfloat16, and dtype is float16"),
        ("linear=mosaic", CPU, "is for NVIDIA's Hopper (9.0)"),
        ("experts=triton", AMPERE._replace(devices=2), "is for one device"),
        ("experts=triton", CPU, "is for NVIDIA GPUs since Ampere (8.0), and this device is a cpu"),
        ("sampling=triton", AMPERE._replace(capability=7.5), "compute capability 7.5"),
        ("routing=triton", AMPERE._replace(has_triton=False), 'needs jax-triton: pip install ".[cuda13]"'),
        ("linear=fp8", AMPERE._replace(capability=8.9), "rounds activations, which is quantization = w8a8_fp8"),
        ("linear=fp8", AMPERE._replace(factors_in_8_bits=True), "is for NVIDIA GPUs since Ada (8.9)"),
        ("auto", AMPERE._replace(factors_in_8_bits=True), "is for NVIDIA GPUs since Ada (8.9)"),
        ("linear=xla", CPU._replace(factors_in_8_bits=True), "must not be named with quantization = w8a8_fp8"),
        ("attention=mosaic", SAME, "must be mosaic_whole if deterministic = True"),
        ("attention=mosaic_splits", SAME, "must be mosaic_whole if deterministic = True"),
        ("attention=triton", AMPERE._replace(deterministic=True), "must be triton_whole if deterministic = True"),
        ("auto", HOPPER._replace(wrong_compiler="ptxas 12.8.93 (/x)"), "ptxas 12.8.93 (/x) gives wrong code for it"),
        ("xla,linear=mosaic", HOPPER._replace(wrong_compiler="ptxas 12.8.93 (/x)"), "choose linear=xla"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(asked: str, facts: DeviceFacts, said: str) -> None:
    """By operation and name, with what it is for; no other takes its place."""
    with pytest.raises(ConfigError) as error:
        resolve(asked, facts)
    assert said in str(error.value)
    assert str(error.value).startswith("kernels = '")
    if asked != "auto":
        assert asked.rpartition(",")[2] in str(error.value)


def test_a_compiler_that_gives_wrong_code_is_no_matter_to_kernels_without_wgmma() -> None:
    """Elementwise operations and routing have none."""
    facts = HOPPER._replace(wrong_compiler="ptxas 12.8.93 (/x)")
    assert resolve("attention=xla,experts=xla", facts).elementwise == "mosaic"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("auto", {}),
        ("attention=triton, elementwise=xla", {"attention": "triton", "elementwise": "xla"}),
        ("xla", dict.fromkeys(OPERATIONS, "xla")),
        ("xla,attention=cpu", dict.fromkeys(OPERATIONS, "xla") | {"attention": "cpu"}),
        ("reference", dict.fromkeys(OPERATIONS, "xla") | {"attention": "reference", "experts": "reference"}),
    ],
)
def test_names_are_read(text: str, want: dict[str, str]) -> None:
    assert named_in(text) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' must be xla, reference, or one of attention, experts"),
        ("mosaic", "'mosaic' must be xla"),
        ("attention", "'attention' must be"),
        ("moe=xla", "one of attention, experts, linear"),
        ("attention=cuda", "attention must be one of cpu, mosaic"),
        ("elementwise=xla,", "'' must be"),
        ("auto,elementwise=xla", "'auto' must be"),
        (None, "pairs such as"),
        (["xla"], "pairs such as"),
    ],
)
def test_malformed_names_are_refused_with_the_options(text: Any, said: str) -> None:
    """At once, before any file is read."""
    with pytest.raises(ConfigError) as error:
        EngineConfig(kernels=text)
    assert said in str(error.value)
    assert error.value.field == "kernels"


def test_former_options_name_what_they_have_become() -> None:
    assert instead_of("moe_backend") == "kernels=experts=NAME"
    assert instead_of("glue_backend") == "kernels=elementwise=NAME"
    assert instead_of("linear_backend") == "kernels=linear=NAME, or quantization=w8a8_fp8 for fp8"
    assert instead_of("experts_backend") is None


def test_a_batch_invariant_engine_adds_by_one_library() -> None:
    """The CPU's, or Hopper's kernels; each other kernel ends it."""
    cpu = resolve("auto", CPU._replace(deterministic=True))
    hopper = resolve("auto", SAME)
    assert (hopper.attention, hopper.experts, hopper.sums) == ("mosaic_whole", "mosaic", "triton")
    assert cpu.batch_invariant
    assert hopper.batch_invariant
    assert cpu._replace(elementwise="xla").batch_invariant, "norms add by what `sums` says"
    for operation in ("attention", "experts", "linear", "sampling"):
        other: dict[str, Any] = {operation: "xla"}
        assert not cpu._replace(**other).batch_invariant
    others: list[dict[str, Any]] = [
        {"linear": "xla"},
        {"elementwise": "xla"},
        {"routing": "triton"},
        {"attention": "mosaic"},
    ]
    for other in others:
        assert not hopper._replace(**other).batch_invariant
    assert resolve("linear=mosaic,elementwise=mosaic", HOPPER).sums == "xla"
    assert resolve("linear=mosaic", SAME) == hopper
    for named in ("linear=xla", "elementwise=xla", "routing=triton"):
        assert resolve(named, SAME).sums == "xla"


def test_a_model_that_cannot_be_batch_invariant_gets_the_usual_kernels() -> None:
    """But none that splits keys by what is in a step."""
    usual = Kernels("mosaic_whole", "mosaic", 132, sampling="triton")
    assert resolve("auto", SAME, ServedKernels(alone=lambda kernels: kernels.linear != "mosaic")) == usual
    assert (
        resolve(
            "auto", SAME, ServedKernels(lambda kernel: "why" if kernel == kernel_of("elementwise", "mosaic") else None)
        )
        == usual
    )


def test_what_could_be_mended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each reason; nothing of kernels that are for other devices, of the library, or of named ones."""
    with caplog.at_level(logging.INFO, "jswa"):
        resolve("auto", AMPERE._replace(has_triton=False))
        resolve("auto", HOPPER, NO_ELEMENTWISE)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        assert "attention=triton, sampling=triton: needs jax-triton" in caplog.text
        assert "elementwise=mosaic does not serve this model: a LayerNorm" in caplog.text
        caplog.clear()
        for facts in (CPU, CPU._replace(no_library=NO_LIBRARY), HOPPER, AMPERE, AMPERE._replace(capability=7.5)):
            resolve("auto", facts)
        resolve("xla", AMPERE._replace(has_triton=False))
        assert not caplog.text


def elementwise(kernel: Kernel) -> bool:
    """Whether a kernel is elementwise."""
    return kernel.operation == "elementwise"


def test_a_kernel_that_cannot_serve_the_model_is_left_out_or_refused() -> None:
    """If it is named."""
    assert (
        resolve("auto", HOPPER, ServedKernels(lambda kernel: "why" if kernel.name == "mosaic" else None)).elementwise
        == "xla"
    )
    with pytest.raises(ConfigError, match="kernels = 'elementwise=mosaic': why"):
        resolve("elementwise=mosaic", HOPPER, ServedKernels(lambda kernel: "why" if elementwise(kernel) else None))


FACTS = st.builds(
    DeviceFacts,
    st.sampled_from(["cpu", "gpu", "tpu"]),
    st.sampled_from([None, 7.5, 8.0, 8.9, 9.0, 10.0]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([1, 2]),
    st.none(),
    packed_experts=st.booleans(),
    factors_in_8_bits=st.booleans(),
    deterministic=st.booleans(),
    no_library=st.sampled_from(["", NO_LIBRARY]),
    has_triton=st.booleans(),
    wrong_compiler=st.sampled_from(["", "ptxas 12.8.93 (/x)"]),
    interpreted=st.booleans(),
)


@given(facts=FACTS, named=st.lists(st.sampled_from(TABLE), max_size=3))
def test_what_is_resolved_can_run_and_is_what_was_named(facts: DeviceFacts, named: list[Kernel]) -> None:
    """Or an error names the kernel. Without names, an error is about rounded activations or a faulty compiler only."""
    asked = {kernel.operation: kernel.name for kernel in named}
    text = ",".join(f"{operation}={name}" for operation, name in asked.items()) or "auto"
    try:
        chosen = resolve(text, facts)
    except ConfigError:
        assert named or facts.factors_in_8_bits or facts.wrong_compiler
        return
    for operation, name in chosen.table().items():
        kernel = kernel_of(operation, name)
        assert all(need.met(facts) for need in kernel.needs)
        assert not (facts.deterministic and kernel.mixes)
        assert not (kernel.wgmma and facts.wrong_compiler)
        assert asked.get(kernel.operation, name) == name
    if facts.factors_in_8_bits:
        assert chosen.linear == "fp8"


@given(facts=FACTS, named=st.lists(st.sampled_from(TABLE), max_size=3))
def test_a_library_that_no_kernel_may_be_of_changes_no_choice(facts: DeviceFacts, named: list[Kernel]) -> None:
    """So it need not be built."""
    text = ",".join(f"{kernel.operation}={kernel.name}" for kernel in named) or "auto"
    for asked in (text, f"xla,{text}" if named else "xla"):
        found = []
        for no_library in ("", NO_LIBRARY):
            try:
                found.append(resolve(asked, facts._replace(no_library=no_library)))
            except ConfigError:
                found.append(Kernels())
        assert found[0] == found[1] or may_take_library(asked, facts)
        assert may_take_library(asked, facts) or "cpu" not in found[0].table().values()


@pytest.mark.parametrize(
    ("asked", "facts", "may"),
    [
        ("auto", CPU, True),
        ("attention=xla", CPU, True),
        ("xla,linear=cpu", CPU, True),
        ("xla", CPU, False),
        ("xla", CPU._replace(deterministic=True), False),
        ("attention=xla,experts=xla,linear=xla,elementwise=xla", CPU, False),
        ("attention=xla,experts=xla,linear=xla,elementwise=xla", CPU._replace(deterministic=True), True),
        ("auto", CPU._replace(devices=2), False),
        ("auto", HOPPER, False),
    ],
)
def test_the_library_is_wanted_only_where_it_may_run(asked: str, facts: DeviceFacts, may: bool) -> None:
    assert may_take_library(asked, facts) == may


@given(facts=FACTS.map(lambda facts: facts._replace(deterministic=False, interpreted=False)))
def test_every_choice_has_a_reason(facts: DeviceFacts) -> None:
    """It names no kernel that could run, nor any for other devices."""
    try:
        chosen = resolve("auto", facts)
    except ConfigError:
        return
    for operation, name in chosen.table().items():
        reason = reason_of(operation, name, facts)
        assert "does not serve" not in reason
        assert not any(f"{other}, and this device" in reason for other in ("(9.0)", "(8.0)", "(8.9)", "a CPU"))


@pytest.mark.parametrize(
    ("operation", "name", "facts", "reason"),
    [
        ("attention", "cpu", CPU, "the first choice on this device"),
        ("attention", "xla", CPU._replace(no_library="why"), "cpu needs the library of CPU kernels: why"),
        ("attention", "xla", CPU._replace(devices=2), "cpu is for one device, and tensor_parallel_size is 2"),
        ("routing", "xla", CPU, "the only one for this device"),
        ("routing", "xla", AMPERE, "the only one for this device"),
        ("sampling", "xla", CPU, "cpu is for deterministic = True"),
        ("attention", "triton", AMPERE, "the first choice on this device"),
        ("experts", "mosaic", HOPPER, "mosaic_overlap is for experts in MXFP4 or NVFP4"),
        ("elementwise", "xla", HOPPER, "mosaic does not serve this model"),
    ],
)
def test_a_kernel_that_cannot_be_chosen_says_why(operation: str, name: str, facts: DeviceFacts, reason: str) -> None:
    assert reason_of(operation, name, facts) == reason


def test_each_operation_ends_with_a_kernel_for_any_device() -> None:
    """So that `auto` always finds one; no two rows have a name."""
    for operation in OPERATIONS:
        rows = [kernel for kernel in TABLE if kernel.operation == operation]
        assert any(not kernel.needs and kernel.auto == () and not kernel.mixes for kernel in rows)
        assert len({kernel.name for kernel in rows}) == len(rows)


def row_of(kernel: Kernel) -> str:
    """A row of the table in docs/kernels.md."""
    needs, further = (", ".join(need.name for need in needs) for needs in (kernel.needs, kernel.auto or ()))
    auto = "no" if kernel.auto is None else further or "yes"
    promise = "never" if kernel.mixes else ", ".join(sorted(kernel.alone_with))
    return f"| {kernel.operation} | `{kernel.name}` | {needs} | {auto} | {promise} |"


def test_the_guide_has_the_table() -> None:
    """Row by row."""
    guide = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    found = [line for line in guide.splitlines() if line.startswith(tuple(f"| {name} |" for name in OPERATIONS))]
    assert found == [row_of(kernel) for kernel in TABLE]
