"""Matrices held in 4 bits: their numbers and logits are, bit for bit, those of the dequantized checkpoint."""

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, ConfigError
from jswa.forms.base.names import CODES, GROUP_OF, SCALES, ZEROS
from jswa.llm import LLM
from jswa.model.binding import bind
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.lora.files import check_adapters, load_adapters
from jswa.model.weights.packed.int4 import Arrays, for_devices
from jswa.storage.convert import convert
from pallas_kernels import interpreter
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.int4_tiles import Int4Tiles, untiled
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.checkpoints.packed_integers import CASES, Case, held_numbers, write_both
from tests.support.checkpoints.quantized import plain_tensors
from tests.support.nights import sample
from tests.support.oracles import dense_attention, dense_logits, quick_compiles

FLOAT32, BFLOAT16 = np.dtype(np.float32), jnp.dtype("bfloat16")
OVERLAP: Implementation = "mosaic_overlap"
TOKENS = np.arange(3, 20, dtype=np.int32)
FOUR_BITS = [name for name, case in CASES.items() if case.bits == 4]
SMALL: dict[str, Any] = {"intermediate_size": 128}
HALF = {  # of each head is rotated, so that folded keys move runs of eight numbers
    "rope_parameters": {
        "full_attention": {"rope_theta": 500.0, "rope_type": "proportional", "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 300.0, "rope_type": "default"},
    }
}
LINEAR = (".attention.qkv", ".attention.out", ".gate_up", ".down")


def load(folder: Path, mode: QuantizationMode = "auto", **more: Any) -> Params:
    """Load parameters whose other matrices are float32, unless `dtype` says otherwise."""
    return load_checkpoint(folder, more.pop("dtype", FLOAT32), quantization=mode, **more)[1]


def numbers(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters with the float32 numbers of matrices in 4 bits, computed by the definition."""
    out = {}
    for name, value in params.items():
        base, _, field = name.rpartition(".")
        if field == CODES:
            scales, zeros = (np.asarray(params[f"{base}.{other}"]) for other in (SCALES, ZEROS))
            table = params.get(f"{base}.{GROUP_OF}")
            out[base] = held_numbers(np.asarray(value), scales, zeros, None if table is None else np.asarray(table))
        elif field not in (SCALES, ZEROS, GROUP_OF):
            out[name] = np.asarray(value)
    return out


def assert_equal(one: dict[str, np.ndarray], other: Params) -> None:
    """Assert that parameters are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, np.asarray(other[name]), err_msg=name)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_every_form_is_held_in_4_bits_with_the_numbers_of_its_definition(name: str, tmp_path: Path) -> None:
    """Neither sums nor numbers differ from those of the dequantized checkpoint."""
    packed, plain = write_both(tmp_path, CASES[name], "llama_one_layer", **SMALL)
    held, whole = load(packed), load(plain)
    assert {key for key in held if key.endswith(CODES)} == {f"{key}.{CODES}" for key in whole if key.endswith(LINEAR)}
    assert any(key.endswith(GROUP_OF) for key in held) == CASES[name].act_order
    assert_equal(numbers(held), whole)
    model, _ = load_checkpoint(packed, FLOAT32)
    with quick_compiles():
        np.testing.assert_array_equal(dense_logits(model, held, TOKENS), dense_logits(model, whole, TOKENS))


@pytest.mark.parametrize(
    ("fixture", "case", "changes"),
    [
        ("gemma4_text_mix", Case("compressed", group=8, symmetric=True), SMALL | HALF),  # whole groups change places
        ("gemma4_text_mix", Case("compressed", group=16), SMALL),  # inputs change their groups
        ("phi3_base", CASES["compressed"], SMALL),
        ("mixtral_base", CASES["compressed"], SMALL),
    ],
)
def test_all_layouts_of_checkpoints_are_read(fixture: str, case: Case, changes: dict[str, Any], tmp_path: Path) -> None:
    """Folded keys, fused projections and stacks of experts."""
    packed, plain = write_both(tmp_path, case, fixture, **changes)
    held, whole = load(packed), load(plain)
    assert sum(key.endswith(CODES) for key in held) >= 4
    assert any(key.endswith(GROUP_OF) for key in held) == (case.group == 16)
    assert_equal(numbers(held), whole)


@pytest.mark.parametrize("name", sample(["compressed", "compressed act-order"], 2))
def test_a_model_of_16_bits_with_experts_gives_the_logits_of_its_dequantized_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """Bit for bit: numbers are rounded to the engine's dtype before they are multiplied."""
    packed, plain = write_both(tmp_path, CASES[name], "mixtral_base", num_hidden_layers=1, **SMALL)
    bfloat16 = jnp.dtype("bfloat16")
    model, held = load_checkpoint(packed, bfloat16, quantization="auto")
    assert f"layers.0.mlp.gate_up.{CODES}" in held
    found, wanted = (
        dense_logits(model, params, TOKENS, compiled=True) for params in (held, load(plain, dtype=bfloat16))
    )
    np.testing.assert_array_equal(found, wanted)


def test_matrices_that_4_bits_cannot_hold_are_held_in_the_engines_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If q, k and v order their inputs differently, or one of them is plain. The log names the former."""
    packed, plain = write_both(tmp_path, CASES["gptq act-order"], "llama_one_layer", one_order=False, **SMALL)
    with caplog.at_level(logging.WARNING, "jswa"):
        held = load(packed)
    assert "layers.0.attention.qkv is not held in 4 bits" in caplog.text
    assert {f"layers.0.{name}.{CODES}" for name in ("attention.out", "mlp.down")} == {
        key for key in held if key.endswith(CODES)
    }
    assert_equal(numbers(held), load(plain))
    mixed, plain = write_both(tmp_path / "mixed", CASES["gptq"], "llama_one_layer", others={"k_proj": None})
    held = load(mixed)
    assert "layers.0.attention.qkv" in held
    assert_equal(numbers(held), load(plain))


def test_groups_of_different_sizes_become_the_smaller_ones(tmp_path: Path) -> None:
    """As in checkpoints whose layers have several group sizes: q, k and v are one matrix here."""
    case = CASES["compressed"]
    packed, plain = write_both(tmp_path, case, "llama_one_layer", others={"k_proj": case._replace(group=16)})
    held = load(packed)
    assert held[f"layers.0.attention.qkv.{SCALES}"].shape[0] == 4
    assert held[f"layers.0.attention.out.{SCALES}"].shape[0] == 2
    assert_equal(numbers(held), load(plain))


def random_matrix(inputs: int, groups: int, *, act_order: bool) -> Arrays:
    """Return a matrix of three outputs."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {
        CODES: rng.integers(0, 256, (inputs // 2, 3), dtype=np.uint8),
        SCALES: rng.uniform(0.5, 2, (groups, 3)).astype(np.float16),
        ZEROS: rng.integers(0, 17, (groups, 3), dtype=np.uint8),
    }
    if act_order:
        arrays[GROUP_OF] = rng.permutation(np.arange(inputs, dtype=np.int32) * groups // inputs)
    return arrays


@pytest.mark.parametrize(
    ("inputs", "groups", "devices", "expected"),
    [(64, 8, 4, 8), (64, 1, 4, 4), (96, 4, 8, 8), (96, 3, 4, 12), (48, 16, 2, 16), (60, 3, 2, 6)],
)
@pytest.mark.parametrize("act_order", [False, True])
def test_no_group_crosses_devices(inputs: int, groups: int, devices: int, expected: int, act_order: bool) -> None:
    """A device has the numbers of its inputs, from its codes, its scales and its groups alone."""
    whole = random_matrix(inputs, groups, act_order=act_order)
    shared = for_devices("it", whole, devices)
    assert len(shared[SCALES]) == (devices * groups if act_order and groups > 1 else expected)
    wanted = held_numbers(whole[CODES], whole[SCALES], whole[ZEROS], whole.get(GROUP_OF))
    shards = {field: np.split(array, devices) for field, array in shared.items()}
    own = []
    for device in range(devices):
        table = shards[GROUP_OF][device] if GROUP_OF in shards else None
        own.append(held_numbers(shards[CODES][device], shards[SCALES][device], shards[ZEROS][device], table))
    np.testing.assert_array_equal(np.concatenate(own), wanted)
    assert for_devices("it", whole, 1) is whole


def test_devices_that_would_share_a_pair_of_inputs_are_refused() -> None:
    """The error names the limit."""
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4: must divide 6, the pairs of inputs of it"):
        for_devices("it", random_matrix(12, 2, act_order=False), 4)


def test_an_engine_gives_the_tokens_of_the_dequantized_checkpoint(tmp_path: Path) -> None:
    """With equal log probabilities, in steps of prompts and in decode steps."""
    found = []
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}
    for folder in write_both(tmp_path, CASES["gptq act-order"], "llama_one_layer", **SMALL):
        with quick_compiles(), LLM(folder, deterministic=True, **options) as llm:
            prompt = TOKENS.tolist()
            (out,) = llm.generate([prompt], temperature=0, max_tokens=4, logprobs=0, ignore_eos=True, use_tqdm=False)
        (one,) = out.outputs
        assert one.logprobs is not None
        found.append([(t, table[t].logprob) for t, table in zip(one.token_ids, one.logprobs, strict=True)])
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_adapters_lie_beside_matrices_in_4_bits(tmp_path: Path) -> None:
    """Logits are those of the same adapters beside the dequantized matrices, bit for bit."""
    packed, plain = write_both(tmp_path, CASES["awq"], "llama_one_layer", **SMALL)
    model, held = load_checkpoint(packed, FLOAT32, quantization="auto")
    lora = random_lora(plain_tensors("llama_one_layer", **SMALL)[1], DENSE, 3, seed=0).write(tmp_path / "lora")
    adapters = load_adapters(check_adapters({"it": lora}, model), model, FLOAT32).params
    own = jnp.ones(len(TOKENS), jnp.int32)

    def logits(params: Params, ids: Array) -> np.ndarray:
        decoder = bind(model, params)
        hidden = decoder(jnp.asarray(TOKENS), jnp.arange(len(TOKENS)), dense_attention(model), adapters=ids)
        return np.asarray(decoder.logits(hidden))

    with quick_compiles():
        found = logits(held | adapters, own)
        np.testing.assert_array_equal(found, logits(load(plain) | adapters, own))
        assert not np.array_equal(found, logits(held | adapters, 0 * own))


@pytest.mark.parametrize("name", ["compressed", "gptq act-order"])
def test_a_converted_checkpoint_is_held_as_its_source(name: str, tmp_path: Path) -> None:
    """Bit for bit; scales keep their type, and other forms are refused."""
    packed, _ = write_both(tmp_path, CASES[name], "mixtral_base", num_hidden_layers=1, **SMALL)
    convert(packed, tmp_path / "converted", "float32")
    for dtype in (FLOAT32, jnp.dtype("bfloat16")):
        held, again = load(packed, dtype=dtype), load(tmp_path / "converted", dtype=dtype)
        assert {key: value.dtype for key, value in held.items()} == {key: value.dtype for key, value in again.items()}
        assert_equal({key: np.asarray(value) for key, value in held.items()}, again)
    modes: tuple[QuantizationMode, ...] = ("none", "int8", "fp8")
    for mode in modes:
        with pytest.raises(ConfigError, match=f"quantization = '{mode}': .* is stored as int4: must be auto"):
            load(tmp_path / "converted", mode)
    with pytest.raises(ConfigError, match=r"kernels = 'experts=mosaic': .* is stored in 4-bit integers: must be xla"):
        load(tmp_path / "converted", experts="mosaic")
    if name == "gptq act-order":
        for folder in (packed, tmp_path / "converted"):
            with pytest.raises(ConfigError, match=r"'experts=mosaic_overlap': layers\..* act-order: must be xla"):
                load(folder, experts=OVERLAP)


def test_the_hopper_kernel_gets_experts_in_16_bits(tmp_path: Path) -> None:
    """Their other matrices are held in 4."""
    packed, _ = write_both(tmp_path, CASES["compressed"], "mixtral_base", num_hidden_layers=1, **SMALL)
    mosaic: Implementation = "mosaic"
    held = load(packed, experts=mosaic)
    assert "layers.0.mlp.gate_up" in held
    assert f"layers.0.attention.qkv.{CODES}" in held


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (Case("compressed", group=16), r"\[\d+, \d+\] in \d groups does not fit multiples of 64 and of 32 inputs"),
        (Case("compressed", dtype=np.float32), "has scales in float32 that are no sums of two numbers of bfloat16"),
    ],
)
def test_groups_and_scales_that_do_not_fit_hopper_are_refused(case: Case, limit: str, tmp_path: Path) -> None:
    """By the name of the matrix."""
    packed, _ = write_both(tmp_path, case, "mixtral_base", num_hidden_layers=1, **SMALL)
    with pytest.raises(ConfigError, match=rf"kernels = 'experts=mosaic_overlap': layers\.0\.mlp.* {limit}"):
        load(packed, experts=OVERLAP)


def on_hopper(folder: Path, name: str) -> tuple[ModelConfig, Params, Params, Path]:
    """Return a model with experts in 4 bits, its parameters for XLA and for Hopper, and its checkpoint."""
    packed, _ = write_both(folder, CASES[name], "mixtral_base", num_hidden_layers=1, **SMALL)
    model, plain = load_checkpoint(packed, BFLOAT16, quantization="auto")
    return model, plain, load(packed, dtype=BFLOAT16, experts=OVERLAP), packed


@pytest.mark.parametrize("name", ["compressed symmetric bf16", "gptq"])
def test_experts_for_hopper_are_tiles_of_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Rounded to bfloat16 once, of scales in bfloat16 and in float16; of a converted checkpoint too."""
    _, plain, tiled, packed = on_hopper(tmp_path, name)
    for matrix in ("layers.0.mlp.gate_up", "layers.0.mlp.down"):
        exact = numbers(plain)[matrix].astype(BFLOAT16).astype(np.float32)
        found = untiled(Int4Tiles(tiled[f"{matrix}.int4_tiles"]))
        np.testing.assert_array_equal(np.swapaxes(found, 1, 2), exact)
    convert(packed, tmp_path / "converted", "bfloat16")
    again = load(tmp_path / "converted", dtype=BFLOAT16, experts=OVERLAP)
    assert_equal({key: np.asarray(value) for key, value in tiled.items()}, again)


def test_experts_in_4_bits_on_hopper_agree_with_those_on_xla(tmp_path: Path) -> None:
    """The kernel is interpreted, and logits differ by rounding to bfloat16."""
    model, plain, tiled, _ = on_hopper(tmp_path, "compressed")
    with quick_compiles(), interpreter.interpreted():
        expected = dense_logits(model, plain, TOKENS[:4]).astype(np.float32)
        got = dense_logits(model, tiled, TOKENS[:4], experts=OVERLAP).astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-5 * np.abs(expected).max())


def test_a_group_that_is_not_there_is_refused() -> None:
    """Also in a converted checkpoint whose checksums fit."""
    whole = random_matrix(16, 2, act_order=True)
    whole[GROUP_OF][3] = 2
    with pytest.raises(CheckpointError, match=r"it\.group_of names group 2: there are 2"):
        for_devices("it", whole, 1)
