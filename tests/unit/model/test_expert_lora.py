"""LoRA adapters of experts, in every form, are the update that PEFT adds to the weights; see `expert_adapters`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jswa.architecture import LayerConfig, ModelConfig, MoeConfig, RouterConfig
from jswa.errors import ConfigError
from jswa.exec.adapters import AdapterRoom
from jswa.exec.launches import decode, encode
from jswa.model.binding import bind
from jswa.model.hf.config import parse_config
from jswa.model.lora import HOPPER_UNIT, adapter_params, lora_kernel, lora_width
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.lora.files import LoraReader, check_adapters, empty_room, load_adapters
from jswa.model.weights.placement import Placement
from jswa.options.lora import LoraRoom
from pallas_kernels import interpreter
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import Mxfp4, unpack
from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import Tensor, write_checkpoint
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.checkpoints.expert_adapters import ExpertLora, random_expert_lora, write, write_fused
from tests.support.oracles import quick_compiles, random_params, small_model
from tests.unit.model.test_lora import FLOAT32

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHORT = ["experts.gate_up_proj", "experts.down_proj"]
# Fixture, the module that has the experts in transformers 5, and its parameters.
FUSED = [
    ("gpt_oss_base", "mlp.experts", PARAMETERS),  # [E, in, out], gates and ups alternate
    ("mixtral_base", "mlp.experts", PARAMETERS),  # the checkpoint has block_sparse_moe
    ("llama4_text_base", "feed_forward.experts", SHORT),
    ("qwen3_moe_base", "mlp.experts", PARAMETERS),
    ("granitemoe_base", "block_sparse_moe.experts", SHORT),
    ("granitemoe_swa_base", "block_sparse_moe.experts", SHORT),
    ("gemma4_untied_moe", "experts", SHORT),
    ("olmoe_base", "mlp.experts", PARAMETERS),
    ("mimo_v2_flash_base", "mlp.experts", PARAMETERS),
    ("step3p7_base", "mlp.experts", PARAMETERS),
    ("iquest_q1_base", "mlp.experts", ["experts.fc", "experts.proj"]),
    ("phimoe_base", "mlp.experts", PARAMETERS),
    ("afmoe_base", "mlp.experts", PARAMETERS),
]
SPLIT = [
    ("mixtral_base", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ("qwen3_moe_base", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ("mimo_v2_flash_base", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ("gemma4_untied_moe", "experts", ("gate_proj", "up_proj", "down_proj")),  # the checkpoint's are fused
]


def loaded(folder: Path, fixture: Fixture) -> tuple[ModelConfig, Params]:
    """Write and load a checkpoint."""
    write_checkpoint(folder, fixture.config, fixture.tensors)
    return load_checkpoint(folder, FLOAT32)


def require_merged(
    fixture: Fixture, tensors: dict[str, Tensor], base: Params, adapters: Params, index: int, folder: Path
) -> None:
    """Assert that each matrix with the update of an adapter added is the matrix of the merged checkpoint."""
    write_checkpoint(folder, fixture.config, tensors)
    merged, moved = load_checkpoint(folder, FLOAT32)[1], 0
    for name, value in base.items():
        expected = np.asarray(merged[name], np.float64)
        delta = update(adapters, name, index) if f"{name}.lora_a" in adapters else np.zeros(())
        np.testing.assert_allclose(np.asarray(value, np.float64) + delta, expected, atol=2e-6, err_msg=name)
        moved += bool(np.abs(expected - np.asarray(value)).max() > 0.01)
    assert moved


def update(adapters: Params, name: str, index: int) -> Float[np.ndarray, "..."]:
    """Return A · B of one adapter beside a matrix or a stack."""
    a, b, owner = (np.asarray(adapters[f"{name}.lora_{end}"]) for end in ("a", "b", "owner"))
    own = owner == index
    return np.asarray(a[..., own].astype(np.float64) @ b[..., own, :])


@pytest.mark.parametrize(("name", "module", "parameters"), FUSED)
def test_fused_experts_are_as_peft_merges_them(name: str, module: str, parameters: list[str], tmp_path: Path) -> None:
    """Adapters differ in ranks and parameters, and in the sides of A, as PEFT's versions do."""
    fixture = load_fixture(name)
    loras: dict[str, tuple[ExpertLora, bool, Any]] = {
        "both": (random_expert_lora(fixture.tensors, 3, seed=1), False, {}),
        "one": (random_expert_lora(fixture.tensors, 2, seed=2, only="down", use_rslora=True), False, {}),
        "swapped": (random_expert_lora(fixture.tensors, 4, seed=3, alpha=11.5), True, {}),
    }
    folders = {}
    for label, (lora, swapped, more) in loras.items():
        targets = parameters[1:] if label == "one" else parameters
        tensors = lora.fused(module, swapped=swapped)
        folders[label] = write(tmp_path / label, tensors, lora, target_parameters=targets, **more)
    model, params = loaded(tmp_path, fixture)
    adapters = load_adapters(check_adapters(folders, model), model, FLOAT32).params
    for index, (label, (lora, *_)) in enumerate(loras.items(), start=1):
        merged = lora.merged(fixture.tensors)
        require_merged(fixture, merged, params, adapters, index, tmp_path / f"{label}_merged")


@pytest.mark.parametrize(("name", "folder", "leaves"), SPLIT)
def test_split_experts_are_as_merged(name: str, folder: str, leaves: tuple[str, str, str], tmp_path: Path) -> None:
    """One module for each expert and matrix; attention is adapted too, and experts differ in rank."""
    fixture = load_fixture(name)
    lora = random_expert_lora(fixture.tensors, 3, seed=5)
    dense = random_lora(fixture.tensors, DENSE, 3, seed=6, alpha=6.0)
    lower = f"{lora.layers[0][0].layer}.{folder}.1.{leaves[2]}"
    tensors = dense.tensors() | lora.split(folder, leaves)
    for half, part in (("A", np.s_[:2]), ("B", np.s_[:, :2])):
        key = f"base_model.model.{lower}.lora_{half}.weight"
        tensors[key] = np.ascontiguousarray(tensors[key][part])
    downs = lora.layers[0][2]
    assert downs is not None
    downs[1][1, :, 2] = 0  # the rank that expert 1 lacks
    where = write(tmp_path / "it", tensors, lora, rank_pattern={lower: 2}, alpha_pattern={lower: 4.0})
    model, params = loaded(tmp_path, fixture)
    adapters = load_adapters(check_adapters({"it": where}, model), model, FLOAT32).params
    require_merged(fixture, lora.merged(dense.merged(fixture.tensors)), params, adapters, 1, tmp_path / "merged")


@pytest.mark.parametrize(
    ("name", "form"), [("gpt_oss_base", "projections"), ("granitemoe_base", "modules"), ("step3p7_base", "stacked")]
)
def test_other_modules_of_experts_are_as_merged(name: str, form: str, tmp_path: Path) -> None:
    """Unsloth's gpt-oss has a linear layer for each expert and parameter; Granite's checkpoints have two modules."""
    fixture = load_fixture(name)
    lora = random_expert_lora(fixture.tensors, 3, seed=7, only="down" if form == "stacked" else "")
    if form == "projections":
        tensors = lora.projections("mlp.experts")
    elif form == "modules":
        tensors = lora.own_modules(("input_linear", "output_linear"))
    else:
        tensors = lora.fused("moe.down_proj")
    where = write(tmp_path / "it", tensors, lora)
    model, params = loaded(tmp_path, fixture)
    adapters = load_adapters(check_adapters({"it": where}, model), model, FLOAT32).params
    require_merged(fixture, lora.merged(fixture.tensors), params, adapters, 1, tmp_path / "merged")


MIXTRAL = load_fixture("mixtral_base")
MODEL = parse_config(MIXTRAL.config)
LAYER = "base_model.model.model.layers.0."
Tensors = dict[str, Tensor]


def add(key: str) -> Callable[[Tensors], object]:
    """Return what adds a module's tensors to those of an adapter."""
    pair = {"A": (3, 64), "B": (96, 3)}
    return lambda t: t.update({f"{LAYER}{key}.lora_{h}.weight": np.zeros(s, np.float32) for h, s in pair.items()})


def only_downs(tensors: Tensors) -> None:
    """Take the wrappers inside of others away."""
    for key in [key for key in tensors if "base_layer" in key]:
        del tensors[key]


def turn_one(tensors: Tensors) -> None:
    """Swap A and B of one stack."""
    a, b = (f"{LAYER}mlp.experts.lora_{half}.weight" for half in "AB")
    tensors[a], tensors[b] = np.ascontiguousarray(tensors[b].T), np.ascontiguousarray(tensors[a].T)


@pytest.mark.parametrize(
    ("change", "fields", "most", "expected"),
    [
        (dict, {}, LoraRoom(2, 3), "adapts experts: max_loras reserves .*: set lora_experts = true"),
        (dict, {}, LoraRoom(2, 2, experts=True), "r = 3 of .*gate_up_proj: must be at most max_lora_rank = 2"),
        (only_downs, {"target_parameters": []}, None, r"target_parameters = \[\] of .*must name gate_up_proj or"),
        (only_downs, {}, None, r"target_parameters = \['gate_up_proj', 'down_proj'\] of .*both if the file has both"),
        (turn_one, {}, None, "has inputs and outputs the other way round than"),
        (dict, {"rank_pattern": {"down_proj": 2}}, None, r"has shape \[12, 96\], .* ask for \[8, 96\] or \[8, 64\]"),
        (add("mlp.gate"), {}, None, "adapts a router, which is not supported"),
        (add("block_sparse_moe.gate"), {}, None, "adapts a router, which is not supported"),
        (add("mlp.experts.9.w1"), {}, None, "experts.9.w1.weight, which a model of type mixtral does not have"),
        (add("mlp.experts.1.w9"), {}, None, "experts.1.w9.weight, which a model of type mixtral does not have"),
        (add("mlp.experts.base_layer.base_layer"), {}, None, "adapts a third parameter of .*must be one of"),
        (add("block_sparse_moe.experts.1.w1"), {}, None, "adapts .*, which .*adapts too"),
    ],
)
def test_adapters_of_experts_that_cannot_be_served_are_refused(
    change: Callable[[Tensors], object], fields: dict[str, Any], most: LoraRoom | None, expected: str, tmp_path: Path
) -> None:
    lora = random_expert_lora(MIXTRAL.tensors, 3, seed=1)
    tensors = lora.fused("mlp.experts")
    change(tensors)
    folder = write(tmp_path / "it", tensors, lora, **{"target_parameters": PARAMETERS, **fields})
    with pytest.raises(ConfigError, match=expected):
        check_adapters({"it": folder}, MODEL, *() if most is None else (most,))


def test_a_square_stack_alone_is_refused(tmp_path: Path) -> None:
    """Nothing tells which side of A has the inputs."""
    fixture = load_fixture("qwen3_moe_base")
    lora = random_expert_lora(fixture.tensors, 3, seed=1, only="gate_up")
    folder = write(tmp_path / "it", lora.fused("mlp.experts"), lora, target_parameters=PARAMETERS[:1])
    with pytest.raises(ConfigError, match="its sides are equal, so nothing tells A's inputs from outputs"):
        check_adapters({"it": folder}, parse_config(fixture.config))


def test_a_slot_of_the_room_holds_the_adapter_alone(tmp_path: Path) -> None:
    """The launches may have come from another host."""
    room, dtype = LoraRoom(2, 3, experts=True), FLOAT32
    lora = random_expert_lora(MIXTRAL.tensors, 3, seed=1)
    params = empty_room(MODEL, room, dtype)
    slots = AdapterRoom(Placement(MODEL), room.rank, params)
    pairs = LoraReader(MODEL, MODEL, dtype, room).read(write_fused(tmp_path / "it", lora)).pairs
    for launch in decode(encode(slots.launches(1, 7, pairs))):
        params = slots.run(params, launch.arrays)
    for name, (a, b) in pairs.items():
        own = np.asarray(params[f"{name}.lora_owner"]) == 7
        assert own.sum() == a.shape[-1]
        assert not own[: len(own) // 2].any(), "the first slot is another adapter's"
        np.testing.assert_array_equal(np.asarray(params[f"{name}.lora_a"])[..., own], a)
        np.testing.assert_array_equal(np.asarray(params[f"{name}.lora_b"])[:, own], b)


MOE = MoeConfig(6, 2, 64, "silu", RouterConfig("softmax", normalize=True))
MOES = {
    "plain": MOE,
    "biases, clamp and alpha": dataclasses.replace(
        MOE, router=RouterConfig("top_k_softmax", bias=True), bias=True, clamp=0.7, alpha=1.702
    ),
    "weights on the input": dataclasses.replace(MOE, router=RouterConfig("top_k_sigmoid"), weight_on_input=True),
}


def mixture(config: MoeConfig) -> tuple[ModelConfig, Params]:
    """Return a model whose only layer has such experts, and its parameters."""
    layer: LayerConfig = dataclasses.replace(small_model("F", d_model=64).layers[0], mlp=config)
    model = dataclasses.replace(small_model("F", d_model=64), layers=(layer,))
    return model, random_params(model)


def beside(params: Params, owner: list[int], parts: tuple[str, ...]) -> Params:
    """Return random adapters beside stacks; columns without an owner hold NaN in A and nothing in B."""
    rng, found = np.random.default_rng(1), Params()
    for part in parts:
        name = f"layers.0.mlp.{part}"
        experts, inputs, outputs = params[name].shape
        a = rng.standard_normal((experts, inputs, len(owner))) / np.sqrt(inputs)
        b = rng.standard_normal((experts, len(owner), outputs)) / 2
        a[..., np.array(owner) < 0], b[:, np.array(owner) < 0] = np.nan, 0
        dtype = params[name].dtype
        found |= adapter_params(name, jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(owner, jnp.int32))
    return found


def ran(
    model: ModelConfig,
    params: Params,
    x: Float[Array, "T M"],
    ids: Int[np.ndarray, " T"],
    implementation: Implementation = "xla",
) -> Float[np.ndarray, "T M"]:
    """Return the output of the mixture."""

    def run(params: Params, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
        out: Array = bind(model, params, experts=implementation).layers[0].mlp(x, jnp.asarray(ids))
        return out

    return np.asarray(jax.jit(run)(params, x).astype(jnp.float32))


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("parts", [("gate_up", "down"), ("gate_up",), ("down",)])
@pytest.mark.parametrize("config", list(MOES.values()), ids=list(MOES))
def test_each_row_has_the_update_of_its_adapter(config: MoeConfig, parts: tuple[str, ...], tokens: int) -> None:
    """Rows of two adapters and of none, side by side, are those of the merged weights of each."""
    (model, params), rng = mixture(config), np.random.default_rng(tokens)
    adapters = beside(params, [1, 1, 2, -1, 2, 2], parts)
    x = jnp.asarray(rng.standard_normal((tokens, 64)), jnp.float32)
    ids = rng.integers(0, 3, tokens)
    with quick_compiles():
        found = ran(model, params | adapters, x, ids)
        for index in range(3):
            merged = dict(params)
            for name in (f"layers.0.mlp.{part}" for part in parts):
                merged[name] = jnp.asarray(params[name] + update(adapters, name, index), jnp.float32)
            expected = ran(model, merged, x, ids)
            np.testing.assert_allclose(found[ids == index], expected[ids == index], atol=2e-6 * np.abs(expected).max())
            others = ids != index
            assert not others.any() or np.abs(found - expected)[others].max() > 0.01


def test_hopper_s_kernel_runs_adapters_of_whole_units() -> None:
    """The kernel is simulated, in 16 bits. Other widths run in XLA's loop, and are filled up before."""
    (model, params), rng = mixture(MOES["biases, clamp and alpha"]), np.random.default_rng(0)
    half = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    adapters = beside(half, [1] * 5 + [2] * 3 + [-1] * (HOPPER_UNIT - 8), ("gate_up", "down"))
    x, ids = jnp.asarray(rng.standard_normal((5, 64)), jnp.bfloat16), rng.integers(0, 3, 5)
    expected = ran(model, half | adapters, x, ids)
    with interpreter.interpreted():
        found = ran(model, half | adapters, x, ids, "mosaic")
    np.testing.assert_allclose(found, expected, rtol=3e-2, atol=3e-2 * np.abs(expected).max())


def test_adapters_lie_beside_experts_in_4_bits() -> None:
    """MXFP4 experts with adapters are those of their dequantized weights with the same adapters."""
    (model, params), rng = mixture(MOES["biases, clamp and alpha"]), np.random.default_rng(3)
    packed, plain = dict(params), dict(params)
    for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down"):
        experts, inputs, columns = packed.pop(name).shape
        blocks = jnp.asarray(rng.integers(0, 256, (experts, columns, inputs // 2), np.uint8))
        numbers = Mxfp4(blocks, jnp.full((experts, columns, inputs // 32), 122, jnp.uint8))
        plain[name] = unpack(numbers, FLOAT32).transpose(0, 2, 1)
        packed |= {f"{name}.{field}": value for field, value in numbers._asdict().items()}
    adapters = beside(plain, [1, 1, 2], ("gate_up", "down"))
    x, ids = jnp.asarray(rng.standard_normal((9, 64)), jnp.float32), rng.integers(0, 3, 9)
    with quick_compiles():
        found, expected = (ran(model, base | adapters, x, ids) for base in (packed, plain))
        assert np.abs(ran(model, packed | adapters, x, 0 * ids) - found).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_widths_are_whole_units_where_hopper_s_kernel_runs_experts() -> None:
    for experts in ("mosaic", "mosaic_overlap"):
        assert [lora_width(width, experts) for width in (1, 64, 65)] == [64, 64, 128]
        assert lora_kernel(experts, 64) == "mosaic"
        assert lora_kernel(experts, 48) == "xla"
    assert (lora_width(5, "xla"), lora_kernel("triton", 5), lora_kernel("cpu", 5)) == (5, "triton", "xla")
