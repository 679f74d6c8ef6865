"""Quantized checkpoints load with transformers' numbers in every layout; invalid ones are refused before any read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jswa.errors import CheckpointError, ModelError
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import Quantization, parse_quantization
from jswa.model.hf.source import TensorPart
from jswa.model.weights.dequantize import read_rows, resolve
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_files import TensorReader, stored_tensors
from jswa.model.weights.safetensors_header import BITS
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.hostile import FILE, edit, pack, unpack
from tests.support.checkpoints.quantized import (
    COMPRESSED,
    FLOAT8,
    INT8,
    fp8_block,
    int8_rows,
    mxfp4,
    plain_tensors,
    write,
)

FLOAT32 = jnp.dtype("float32")
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}
_STORED = np.load(Path(__file__).parents[3] / "parity" / "quantized.npz")
_TYPES = {"float8_e4m3fn": FLOAT8, "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CASES = sorted({name.split("/")[0] for name in _STORED if not name.startswith("packed")})


def stored(case: str, key: str) -> np.ndarray | None:
    """Return an array of the fixture in its type."""
    if f"{case}/{key}" not in _STORED:
        return None
    kind = str(_STORED[f"{case}/{key}/type"])
    array: np.ndarray = _STORED[f"{case}/{key}"].view(_TYPES.get(kind, kind))
    return array


@pytest.mark.parametrize("case", CASES)
def test_dequantized_numbers_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Bits are equal in float32 and bfloat16 for every chunk of rows, except the bits of NaN."""
    weight, scale, zero, want = (stored(case, key) for key in ("weight", "scale", "zero_point", "float32"))
    assert weight is not None
    assert scale is not None
    assert want is not None
    ends = ("_blocks", "_scales") if case == "mxfp4" else ("", "_scale")
    tensors = {f"x{ends[0]}": weight, f"x{ends[1]}": scale} | ({} if zero is None else {"x_zero_point": zero})
    write(tmp_path, {}, tensors)
    found = stored_tensors(tmp_path)
    block = (1, 8) if case.endswith("group") else (16, 8)
    resolved = resolve(TensorPart("x", want.shape), found, Quantization("any", (block,)))
    rows = want.size // want.shape[-1]
    with TensorReader(found) as reader:
        for step in (rows, 7):
            cuts = [(row, min(row + step, rows)) for row in range(0, rows, step)]
            got = np.concatenate([read_rows(resolved, reader, *cut) for cut in cuts]).reshape(want.shape)
            assert_same_bits(got, want)
    rounded = stored(case, "bfloat16")
    assert rounded is not None
    assert_same_bits(got.astype(ml_dtypes.bfloat16), rounded)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Assert equality, including the sign of zeros."""
    assert got.dtype == want.dtype
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 17), st.integers(1, 17), st.sampled_from([1, 2]))
def test_the_last_blocks_may_be_smaller(
    tmp_path_factory: pytest.TempPathFactory, out: int, inner: int, rows: int, columns: int, experts: int
) -> None:
    """This holds for rows and columns of each of several matrices."""
    folder = tmp_path_factory.mktemp("ragged")
    codes, scale, exact = fp8_block(np.random.default_rng(0).standard_normal((experts, out, inner)), (rows, columns))
    write(folder, {}, {"x": codes, "x_scale_inv": scale})
    found = stored_tensors(folder)
    weight = resolve(TensorPart("x", exact.shape), found, Quantization("fp8", ((rows, columns),)))
    with TensorReader(found) as reader:
        got = np.concatenate([read_rows(weight, reader, row, row + 1) for row in range(experts * out)])
    np.testing.assert_array_equal(got.reshape(exact.shape), exact)


def assert_same_params(folder: Path, config: dict[str, Any], exact: dict[str, np.ndarray], quantized: Any) -> None:
    """Assert that a plain and a quantized checkpoint give the same parameters; `quantized` is (config, tensors)."""
    method, tensors = quantized
    write_checkpoint(folder / "plain", config, exact)
    write(folder / "quantized", {**config, "quantization_config": method}, tensors)
    for dtype in (FLOAT32, jnp.dtype("bfloat16")):
        _, plain = load_checkpoint(folder / "plain", dtype)
        _, params = load_checkpoint(folder / "quantized", dtype)
        assert plain.keys() == params.keys()
        for name, value in plain.items():
            assert params[name].dtype == value.dtype
            np.testing.assert_array_equal(params[name], value, err_msg=name)


def is_quantized(key: str) -> bool:
    """Return whether MiMo quantizes a tensor: it does for all linear layers but the output of attention."""
    return key.endswith("_proj.weight") and not key.endswith("o_proj.weight")


def test_mimo_with_a_scale_per_block(tmp_path: Path) -> None:
    """Blocks do not divide experts, attention and dense layers. Static activation scales are ignored."""
    config, exact = plain_tensors("mimo_v2_flash_base")
    tensors: dict[str, np.ndarray] = {}
    for key, value in exact.items():
        tensors[key] = value
        if is_quantized(key):
            tensors[key], tensors[f"{key}_scale_inv"], exact[key] = fp8_block(value, (16, 24))
            tensors[key.replace(".weight", ".activation_scale")] = np.ones((), np.float32)
    assert len(tensors) > len(exact) + 10
    assert_same_params(tmp_path, config, exact, (FP8, tensors))


def test_rank_slices_have_separate_blocks(tmp_path: Path) -> None:
    """MiMo-V2.5 quantized q, k and v of each rank together, and the last block of rows of each is smaller."""
    config, exact = plain_tensors(
        "mimo_v2_flash_base", num_attention_heads=8, num_key_value_heads=4, swa_num_key_value_heads=8
    )
    model = parse_config(config)
    tensors = dict(exact)
    for index, layer in enumerate(model.layers):
        prefix, ends = f"model.layers.{index}.self_attn", []
        keys = [f"{prefix}.{name}_proj.weight" for name in "qkv"]
        ranks = [np.concatenate(x) for x in zip(*(np.split(tensors.pop(key), 4) for key in keys), strict=True)]
        codes, scales, unpacked = zip(*(fp8_block(rank, (20, 24)) for rank in ranks), strict=True)
        assert len(ranks[0]) % 20, layer
        tensors[f"{prefix}.qkv_proj.weight"] = np.concatenate(codes)
        tensors[f"{prefix}.qkv_proj.weight_scale_inv"] = np.concatenate(scales)
        sizes = [len(exact[key]) // 4 for key in keys]
        ends = [sizes[0], sizes[0] + sizes[1]]
        for key, rows in zip(keys, zip(*(np.split(x, ends) for x in unpacked), strict=True), strict=True):
            exact[key] = np.concatenate(rows)
    assert_same_params(tmp_path, config, exact, ({**FP8, "weight_block_size": [20, 24]}, tensors))


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Blocks extend along the inputs, and gates and ups alternate. Without quantization_config the load fails."""
    config, exact = plain_tensors("gpt_oss_base", intermediate_size=96)
    tensors, rng = dict(exact), np.random.default_rng(1)
    for key in [key for key in exact if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(key).shape
        packed, tensors[f"{key}_scales"], unpacked = mxfp4(rng, (experts, out, inner))
        tensors[f"{key}_blocks"] = packed.reshape(experts, out, inner // 32, 16)
        exact[key] = np.swapaxes(unpacked, 1, 2).copy()
    assert_same_params(tmp_path, config, exact, ({"quant_method": "mxfp4"}, tensors))
    write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.experts\.down_proj, "):
        load_checkpoint(tmp_path, FLOAT32)


@pytest.mark.parametrize("end", ["", "_packed"])
def test_mxfp4_with_one_tensor_per_expert(tmp_path: Path, end: str) -> None:
    """MiMo-V2.6 and compressed-tensors store one byte tensor per expert, even if the family stacks experts."""
    config, exact = plain_tensors("llama4_text_base", hidden_size=64, intermediate_size=32, intermediate_size_mlp=64)
    tensors, rng = dict(exact), np.random.default_rng(1)
    for key in [key for key in exact if key.endswith("experts.gate_up_proj")]:
        folder = key.removesuffix("gate_up_proj")
        for name in ("gate_up_proj", "down_proj"):
            experts, inner, out = tensors.pop(f"{folder}{name}").shape
            parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
            for expert in range(experts):
                columns = []
                for part in parts:
                    packed, exponents, unpacked = mxfp4(rng, (out // len(parts), inner))
                    tensors[f"{folder}{expert}.{part}.weight{end}"] = packed
                    tensors[f"{folder}{expert}.{part}.weight_scale"] = exponents
                    columns.append(unpacked.T)
                exact[f"{folder}{name}"][expert] = np.concatenate(columns, axis=1)
    assert_same_params(tmp_path, config, exact, ({"quant_method": "fp8"}, tensors))


def test_int8_with_zero_points(tmp_path: Path) -> None:
    """Scales are per channel, as compressed-tensors writes them; the head is int8 and the embedding plain."""
    config, exact = plain_tensors("llama_gqa")
    tensors: dict[str, np.ndarray] = {}
    for key, value in exact.items():
        tensors[key] = value
        if key.endswith("_proj.weight") or key == "lm_head.weight":
            tensors[key], tensors[f"{key}_scale"], tensors[f"{key}_zero_point"], exact[key] = int8_rows(value)
    assert_same_params(tmp_path, config, exact, (COMPRESSED, tensors))


def test_fp8_with_one_scale_and_a_quantized_tied_head(tmp_path: Path) -> None:
    """A tied model may store its one matrix under the head's name, with scales."""
    config, exact = plain_tensors("llama_tied")
    tensors: dict[str, np.ndarray] = {}
    for key, value in exact.items():
        name = key.replace("model.embed_tokens", "lm_head")
        tensors[name] = value
        if value.ndim == 2:
            tensors[name], scale, exact[key] = fp8_block(value, value.shape)
            tensors[f"{name}_scale"] = scale.reshape(())
    assert_same_params(tmp_path, config, exact, ({"quant_method": "fp8", "activation_scheme": "static"}, tensors))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one layer in fp8 with a scale per block."""
    folder = tmp_path_factory.mktemp("valid")
    config, exact = plain_tensors("llama_one_layer")
    tensors: dict[str, np.ndarray] = dict(exact)
    for key in [key for key in exact if key.endswith("_proj.weight")]:
        tensors[key], tensors[f"{key}_scale_inv"], _ = fp8_block(exact[key], (16, 24))
    write(folder, {**config, "quantization_config": FP8}, tensors)
    load_checkpoint(folder, FLOAT32)
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"  # [64, 64]
S = f"{Q}_scale_inv"  # [4, 3]
Header = dict[str, Any]


def put(key: str, dtype: str, shape: list[int]) -> Callable[[Header], object]:
    """Return a change of type and shape of a header entry that keeps its number of bytes, or is refused anyway."""
    return lambda header: header[key].update(dtype=dtype, shape=shape)


def rename(key: str, other: str) -> Callable[[Header], object]:
    """Return a change of a tensor's name."""
    return lambda header: header.update({other: header.pop(key)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put(S, "F32", [3, 4]), rf"{FILE}: {S} has shape \[3, 4\], {Q} asks for \[4, 3\] or \[64, 1\] or \[64\]"),
        (put(S, "F32", [12]), rf"{S} has shape \[12\]"),
        (put(S, "F32", [4, 3, 1]), rf"{S} has shape \[4, 3, 1\]"),
        (put(S, "I32", [4, 3]), f"{S} has type I32: must be one of F64, F32, F16, BF16, U8, F8_E8M0"),
        (put(S, "F64", [2, 3]), rf"{S} has shape \[2, 3\]"),
        (put(S, "F32", [4, 2**60]), f"{S}: shape = .*less than 2\\^63 bits"),
        (put(S, "F32", [2**40, 3]), f"{S}: data_offsets = .*must span"),
        (put(Q, "I8", [32, 128]), rf"{Q} has shape \[32, 128\], the config asks for \[64, 64\]"),
        (put(Q, "F8_E5M2", [64, 64]), f"{Q} has type F8_E5M2: must be one of F64, F32, F16, BF16, F8_E4M3, I8, U8"),
        (put(Q, "BOOL", [64, 64]), f"{Q} has type BOOL"),
        (put(Q, "U8", [64, 64]), rf"{Q} has shape \[64, 64\], the config asks for \[64, 32\]"),
        (put(Q, "BF16", [64, 32]), f"{Q} has type BF16: must not have {S}"),
        (put("model.norm.weight", "F8_E4M3", [256]), r"model.norm.weight has shape \[256\]"),
        (rename(S, f"{Q}_scal"), f"does not use: {Q}_scal"),
        (rename(S, f"{Q}_zero_point"), f"{Q} has type F8_E4M3: must have exactly one of {Q}_scale or {S}"),
        (rename(Q, f"{Q}_packed"), f"lacks {Q}_scale"),
        (rename(Q, f"{Q}_blocks"), f"lacks {Q}_scales"),
        (rename(S, "model.layers.0.self_attn.q_norm.weight_scale"), "does not use: .*q_norm"),
        (lambda header: header.update({S.replace(".0.", ".7."): header.pop(S)}), r"does not use: model\.layers\.7"),
    ],
)
def test_invalid_quantized_tensors_are_refused_before_a_tensor_is_read(
    valid: Path, tmp_path: Path, change: Callable[[Header], object], expected: str
) -> None:
    """Errors about shapes, types and names have file, key, value and limit."""
    for path in valid.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit(tmp_path / FILE, change)
    with (
        mock.patch(
            "jswa.model.weights.safetensors_files.TensorReader.rows",
            side_effect=AssertionError("a tensor would be read"),
        ),
        pytest.raises(CheckpointError, match=expected),
    ):
        load_checkpoint(tmp_path, FLOAT32)


SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 32, 64, 96, 128, 2**20, 2**40])


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([Q, S, f"{Q.replace('q_proj', 'o_proj')}_scale_inv", "model.norm.weight"]),
            st.tuples(st.just("dtype"), st.sampled_from(sorted(BITS)))
            | st.tuples(st.just("shape"), st.lists(SIZES, max_size=4))
            | st.tuples(st.just("name"), st.sampled_from([f"{Q}_scale", f"{Q}_zero_point", f"{Q}_blocks", "x"])),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_random_headers_give_an_error_or_parameters(valid: Path, edits: list[tuple[str, tuple[str, Any]]]) -> None:
    """Types, shapes and names of quantized tensors are exchanged at random."""
    whole = (valid / FILE).read_bytes()
    header, data = unpack(valid / FILE)
    for key, (field, value) in edits:
        if key in header and field == "name":
            header[value] = header.pop(key)
        elif key in header:
            header[key] = {**header[key], field: value}
    try:
        pack(valid / FILE, header, data)
        model, params = load_checkpoint(valid, FLOAT32, quantization="auto")
        assert params["embed"].shape == (model.vocab_size, model.d_model)
    except CheckpointError as error:
        event(str(error).split()[-1][:20])
    finally:
        (valid / FILE).write_bytes(whole)


def test_ambiguous_scales_and_misshapen_zero_points_are_refused(tmp_path: Path) -> None:
    """The loader does not guess which of two scales counts."""
    config, exact = plain_tensors("llama_one_layer")
    codes, scale, zero, _ = int8_rows(exact[Q])
    base = {**exact, Q: codes, f"{Q}_scale": scale}
    for more, expected in (
        ({S: scale}, f"{Q} has type I8: must have exactly one of"),
        ({f"{Q}_zero_point": zero[:, 0]}, f"{Q}_zero_point has shape .*its scales ask for"),
        ({f"{Q}_zero_point": zero.astype(np.int32)}, f"{Q}_zero_point has type I32: must be one of I8"),
        ({Q: fp8_block(exact[Q], (64, 64))[0], f"{Q}_zero_point": zero}, f"{Q} has type F8_E4M3: must be one of I8"),
        ({Q: np.zeros((64, 32), np.uint8)}, f"{Q}_scale has shape .*asks for .64, 2."),
        ({Q: np.zeros((64, 32), np.uint8), f"{Q}_scale": np.zeros((64, 2), np.int8)}, "_scale has type I8"),
    ):
        write(tmp_path, {**config, "quantization_config": COMPRESSED}, {**base, **more})
        with pytest.raises(CheckpointError, match=expected):
            load_checkpoint(tmp_path, FLOAT32)


def test_a_file_truncated_during_the_read_is_an_error(valid: Path, tmp_path: Path) -> None:
    """The process survives, unlike with a memory map, and no thread is left running."""
    for path in valid.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = stored_tensors(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    with TensorReader(tensors) as reader:
        (tmp_path / FILE).write_bytes(whole[: len(whole) - len(unpack(tmp_path / FILE)[1]) + 10])
        with pytest.raises(CheckpointError, match=r"lm_head.* cannot be read: the file is shorter than it was"):
            reader.rows(tensors["lm_head.weight"], 0, 96)


GROUP = {"weights": INT8, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *(({"quant_method": name}, f"quant_method = '{name}': must be one of") for name in ("bitsandbytes", "quark")),
        ({}, r"quant_method = '\(none\)': must be one of"),
        ({"quant_method": 3}, "quant_method = 3: must be a string"),
        (3, "quantization_config = 3: must be an object"),
        ({**FP8, "fmt": "e5m2"}, "fmt = 'e5m2': must be e4m3"),
        *(
            ({**FP8, "weight_block_size": x}, "weight_block_size = .*two whole")
            for x in (3, [], [1], [0, 1], [1, 2**17])
        ),
        ({**FP8, "weight_block_size": [True, 8]}, "weight_block_size = .*must be two whole numbers"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups = {}: must be an object of 1 to 64 groups"),
        ({**COMPRESSED, "format": "marlin-24"}, "format = 'marlin-24': must be one of float-quantized"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format = 'sparse-24"),
        ({**COMPRESSED, "transform_config": {"a": 1}}, "transform_config needs rotated weights"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "weights": {"num_bits": 4}}}}, "num_bits = 4: must be"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "weights": {"actorder": "group"}}}}, "actorder = 'group'"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "weights": {"strategy": "token"}}}}, "strategy = 'token'"),
        ({**COMPRESSED, "config_groups": {"a": 7}}, "config_groups: 'a': a = 7: must be an object"),
    ],
)
def test_the_error_names_an_unsupported_method(config: Any, expected: str) -> None:
    """It also lists the supported ones."""
    for holder in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
        with pytest.raises(ModelError, match=expected):
            parse_quantization(holder)


def test_block_sizes_of_all_groups_are_parsed() -> None:
    """The shape of a weight's scales decides which of them it has."""
    weights = [{"strategy": "block", "block_structure": [128, 128]}, {"group_size": 32}, {"group_size": -1}, {}]
    groups = {str(number): {"weights": one} for number, one in enumerate(weights)}
    found = parse_quantization({"compression_config": {**COMPRESSED, "config_groups": groups}})
    assert found is not None
    assert found.blocks == ((128, 128), (1, 32))
    assert parse_quantization({"quantization_config": None}) is None
