"""What chosen kernels serve of a model, and whether they compute rows alone (jswa/exec/served.py)."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import ConfigError
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import compile_step
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import state_shapes
from jswa.exec.served import computes_rows_alone, unserved, what_serves
from jswa.kernels import DeviceFacts, Kernels, kernel_of, resolve
from jswa.model.hf.config import parse_config
from pallas_kernels.attention.hopper.call import plan_of as attention_plan
from pallas_kernels.experts.hopper.call import plan_of as experts_plan
from pallas_kernels.experts.hopper.launch import Shape
from tests.parity.load import load_fixture
from tests.support.kernels.calls import shape_of
from tests.support.oracles import random_params, small_model
from tools.cases.hub_configs import CONFIGS
from tools.cases.kernels.attention_layers import LAYERS
from tools.cases.kernels.attention_shapes import arguments

SIXTEEN, EIGHT = jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")
HOPPER = DeviceFacts("gpu", 9.0, "bfloat16", deterministic=True)


@pytest.mark.parametrize(
    ("model", "kernel", "why"),
    [
        ("gpt-oss-20b", ("elementwise", "mosaic"), None),
        ("gpt-oss-20b", ("routing", "triton"), None),
        ("gpt-oss-20b", ("sampling", "triton"), None),
        ("gemma-3-27b", ("elementwise", "mosaic"), None),
        ("Olmo-3-7B", ("elementwise", "mosaic"), "qk_norm_all_heads"),
        ("Llama-4-Scout", ("elementwise", "cpu"), "interleaved pairs"),
        ("Mistral-7B-v0.1", ("elementwise", "cpu"), None),
        ("Mistral-7B-v0.1", ("elementwise", "xla"), None),
    ],
)
def test_kernels_tell_which_models_they_serve(model: str, kernel: tuple[str, str], why: str | None) -> None:
    config = parse_config(CONFIGS[model], weights=False)
    found = unserved(kernel_of(*kernel), config, SIXTEEN)
    assert found is None if why is None else why in str(found)


def test_the_routing_kernel_serves_no_groups_of_experts() -> None:
    config = parse_config(CONFIGS["gpt-oss-20b"], weights=False)
    mixtures = (layer.moe for layer in config.layers)
    grouped = [replace(moe, router=replace(moe.router, groups=4)) for moe in mixtures if moe is not None]
    layers = zip(config.layers, grouped, strict=True)
    config = replace(config, layers=tuple(replace(layer, mlp=moe) for layer, moe in layers))
    assert "a router with 4 groups" in str(unserved(kernel_of("routing", "triton"), config, SIXTEEN))


def test_the_sampling_kernel_serves_no_vocabulary_that_it_cannot_hold() -> None:
    config = replace(parse_config(CONFIGS["gpt-oss-20b"], weights=False), vocab_size=2**25)
    assert "33554432" in str(unserved(kernel_of("sampling", "triton"), config, SIXTEEN))


def test_elementwise_on_a_cpu_writes_no_pages_of_8_bits() -> None:
    """On Hopper it does."""
    model = parse_config(CONFIGS["Mistral-7B-v0.1"], weights=False)
    assert unserved(kernel_of("elementwise", "cpu"), model, EIGHT) == "writes no KV of 8 bits"
    assert unserved(kernel_of("elementwise", "mosaic"), model, EIGHT) is None


def test_a_deterministic_engine_on_a_cpu_computes_rows_alone_unless_xla_multiplies_by_some_matrix() -> None:
    """Adapters' matrices, for one."""
    chosen = resolve("auto", DeviceFacts("cpu", None, "float32", deterministic=True))
    params = {
        "embed": jnp.ones((8, 4)),
        "layers.0.mlp.down": jnp.ones((1, 4, 32)),
        "layers.0.mlp.up_bias": jnp.ones((2, 4)),
    }
    model = small_model("L")
    assert computes_rows_alone(chosen, params, model)
    assert not computes_rows_alone(chosen, {**params, "layers.0.mlp.down.lora_a": jnp.ones((4, 2))}, model)
    assert not computes_rows_alone(chosen._replace(attention="xla"), params, model)


def test_a_deterministic_engine_on_hopper_computes_rows_alone_if_its_kernels_fit_all_matrices() -> None:
    chosen, model = resolve("auto", HOPPER), small_model("LF", d_model=128)
    params = {"embed": jnp.ones((128, 128)), "layers.0.mlp.down": jnp.ones((64, 128))}
    assert computes_rows_alone(chosen, params, model)
    for more in (
        {"embed": jnp.ones((100, 128))},
        {"lm_head": jnp.ones((128, 100))},
        {"layers.0.mlp.shared_gate": jnp.ones((128, 1))},
    ):
        assert not computes_rows_alone(chosen, {**params, **more}, model)
    assert not computes_rows_alone(chosen._replace(routing="triton"), params, model)
    assert not computes_rows_alone(chosen._replace(sums="xla"), params, model)


@pytest.mark.parametrize(
    ("model", "alone"),
    [("gpt-oss-20b", True), ("gemma-3-27b", True), ("Mistral-7B-v0.1", True), ("Olmo-3-7B", False)],
)
def test_deterministic_engines_on_hopper_are_batch_invariant_for_models_that_fit(model: str, alone: bool) -> None:
    """As they are released, in bfloat16 or MXFP4: without adapters, with pages of 16 bits."""
    config = parse_config(CONFIGS[model], weights=False)
    chosen = resolve("auto", HOPPER, what_serves(config, SIXTEEN, SIXTEEN, plain=True))
    assert chosen.batch_invariant == alone
    for served in (what_serves(config, SIXTEEN, SIXTEEN, plain=False), what_serves(config, SIXTEEN, EIGHT, plain=True)):
        usual = resolve("auto", HOPPER, served)
        assert (usual.attention, usual.linear, usual.sums) == ("mosaic_whole", "xla", "xla")


def test_kernels_are_planned_for_the_multiprocessors_of_the_device() -> None:
    """An H20 has 78, an H200 132: experts start as many thread blocks as run at once; splits fill them."""
    attention = shape_of(arguments(next(layer for layer in LAYERS if layer.name == "gpt-oss-20b full, one row")))
    assert attention_plan(attention, 78).tuning.splits < attention_plan(attention, 132).tuning.splits
    bfloat16 = jnp.dtype("bfloat16")
    experts = Shape(256, 32, 2880, 2880, bfloat16, None, bias=False, held="plain")
    assert experts_plan(experts, 78).blocks in (78, 156)


@pytest.mark.parametrize("operation", ["attention", "experts"])
def test_a_model_that_a_kernel_does_not_support_is_refused_with_its_name(operation: str) -> None:
    """Here float32, without any GPU: kernels are traced before they are compiled."""
    model = parse_config(load_fixture("gpt_oss_base").config)
    layout, limits = KVLayout.of(model, 16), Limits(64, 2, 16, page_size=16, num_slabs=9)
    bucket = Bucket(2, 2, decode=True)
    spec = PackSpec.of(bucket, page_size=16, max_rows=2, section=False)
    named: dict[str, Any] = {operation: "mosaic"}
    config = StepConfig(model, layout, bucket, spec, Kernels(**named))
    state = state_shapes(layout, limits, model.vocab_size, jnp.dtype("float32"))
    with pytest.raises(ConfigError, match=f"kernels = '{operation}=mosaic': "):
        compile_step(config, random_params(model), state)
