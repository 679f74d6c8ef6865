"""Matrices held in NVFP4: their numbers are those of the checkpoint, and engines give the same tokens and logits."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import CheckpointError, ConfigError, KernelError
from jswa.exec.buckets import Bucket
from jswa.exec.selfcheck.check import check_kernels
from jswa.forms.base.form import MatrixPlace
from jswa.forms.layouts import lay_out
from jswa.forms.nvfp4 import CODES, ENDS, FACTORS, TILES
from jswa.forms.table import matrix_at
from jswa.kernels import Kernels
from jswa.llm import LLM
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.packed.nvfp4 import READING
from jswa.model.weights.placement import Placement
from jswa.storage.convert import convert
from pallas_kernels import interpreter
from pallas_kernels.cpu import library
from pallas_kernels.experts.hopper import call
from pallas_kernels.experts.nvfp4 import Nvfp4, dequantized
from pallas_kernels.experts.nvfp4_tiles import Nvfp4Tiles
from pallas_kernels.interpreter import interpreted
from tests.support.builders import make_model
from tests.support.checkpoints.float4 import LAYOUTS, Layout, write_both
from tests.support.oracles import dense_logits, quick_compiles

FLOAT32, BFLOAT16 = np.dtype(np.float32), jnp.dtype("bfloat16")
TOKENS = np.arange(3, 20, dtype=np.int32)
SMALL: dict[str, Any] = {"intermediate_size": 128}
LINEAR = (".attention.qkv", ".attention.out", ".gate_up", ".down")
FIXTURES = ["llama_one_layer", "mixtral_base", "phi3_base"]


def load(folder: Path, **more: Any) -> Params:
    """Load parameters whose other matrices are float32, unless `dtype` says otherwise."""
    return load_checkpoint(folder, more.pop("dtype", FLOAT32), quantization=more.pop("mode", "auto"), **more)[1]


def numbers(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters with the float32 numbers of matrices in NVFP4."""
    out = {name: np.asarray(value) for name, value in params.items() if not name.endswith(ENDS)}
    for name in params:
        base, _, field = name.rpartition(".")
        if field == CODES:
            held = Nvfp4(*(params[f"{base}.{own}"] for own in ENDS))
            out[base] = np.asarray(dequantized(held, jnp.dtype("float32")))
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fixture", FIXTURES)
def test_matrices_are_held_with_the_numbers_of_the_checkpoint(layout: Layout, fixture: str, tmp_path: Path) -> None:
    """Bit for bit: q, k and v, gates and ups, and experts have factors of their own."""
    packed, plain = write_both(tmp_path, layout, fixture, **SMALL)
    held, whole = load(packed), load(plain)
    assert {key for key in held if key.endswith(CODES)} == {f"{key}.{CODES}" for key in whole if key.endswith(LINEAR)}
    found = numbers(held)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], np.asarray(value), err_msg=name)
    factors = np.asarray(next(value for name, value in held.items() if name.endswith(f"qkv.{FACTORS}")))
    assert len({*factors}) == (1 if fixture == "phi3_base" else 3)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_logits_are_those_of_the_dequantized_checkpoint(fixture: str, tmp_path: Path) -> None:
    """In float32 up to the order in which factors multiply: no weight is rounded."""
    packed, plain = write_both(tmp_path, "modelopt", fixture, **SMALL)
    model, held = load_checkpoint(packed, FLOAT32, quantization="auto")
    with quick_compiles():
        found, wanted = (dense_logits(model, params, TOKENS) for params in (held, load(plain)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("layout", "fixture", "backend"),
    [
        ("compressed-tensors", "llama_one_layer", "cpu"),
        ("hf_quant_config", "mixtral_base", "cpu"),
        ("modelopt", "mixtral_base", "xla"),
    ],
)
def test_an_engine_answers_as_on_the_dequantized_checkpoint(
    layout: Layout, fixture: str, backend: Any, tmp_path: Path
) -> None:
    """The same greedy tokens and log probabilities, on the CPU's library and on XLA, in prompts and in decode steps."""
    if backend == "cpu" and not library.available():
        pytest.skip("the library of CPU kernels is not built")
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32, "dtype": "float32"}
    found = []
    for folder in write_both(tmp_path, layout, fixture, **SMALL):
        with quick_compiles(), LLM(folder, kernels=f"linear={backend},experts={backend}", **options) as llm:
            prompt = TOKENS.tolist()
            (out,) = llm.generate([prompt], temperature=0, max_tokens=6, logprobs=0, ignore_eos=True, use_tqdm=False)
        (one,) = out.outputs
        assert one.logprobs is not None
        found.append((one.token_ids, [table[t].logprob for t, table in zip(one.token_ids, one.logprobs, strict=True)]))
    assert len(found[0][0]) == 6
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=2e-4)


def test_a_mixture_of_formats_is_held_as_each_matrix_allows(tmp_path: Path) -> None:
    """A fused matrix of which one part is in another format is held in the engine's dtype; others as stored."""
    packed, plain = write_both(
        tmp_path,
        "modelopt",
        "llama_one_layer",
        others={"k_proj": "fp8", "down_proj": "plain", "o_proj": "fp8"},
        **SMALL,
    )
    held, whole = load(packed), load(plain)
    prefix = "layers.0."
    assert f"{prefix}mlp.gate_up.{CODES}" in held
    assert f"{prefix}attention.out.values" in held
    np.testing.assert_array_equal(held[f"{prefix}attention.qkv"], whole[f"{prefix}attention.qkv"])
    np.testing.assert_array_equal(held[f"{prefix}mlp.down"], whole[f"{prefix}mlp.down"])


def test_a_converted_checkpoint_is_the_same(tmp_path: Path) -> None:
    """Its files are the parameters."""
    packed, _ = write_both(tmp_path, "compressed-tensors", "mixtral_base", **SMALL)
    convert(packed, tmp_path / "converted", "float32")
    held, read = load(packed), load(tmp_path / "converted")
    assert held.keys() == read.keys()
    for name, value in held.items():
        np.testing.assert_array_equal(np.asarray(read[name]), np.asarray(value), err_msg=name)
    with pytest.raises(ConfigError, match="is stored as nvfp4: must be auto"):
        load(tmp_path / "converted", mode="int8")


def test_hopper_s_tiles_have_the_same_numbers(tmp_path: Path) -> None:
    """Of linear layers and of experts; without an axis of experts, or with one."""
    packed, plain = write_both(tmp_path, "modelopt", "mixtral_base", hidden_size=64, intermediate_size=128)
    held = load(packed, dtype=BFLOAT16, experts="mosaic_overlap", linear="mosaic")
    lay_out(held, linear="mosaic", experts=False)
    whole = load(plain)
    for name in ("layers.0.attention.qkv", "layers.0.mlp.gate_up", "layers.0.mlp.down"):
        tiles = matrix_at(MatrixPlace(name, whole[name].shape, linear="mosaic"), held)
        tiles = tiles if isinstance(tiles, Nvfp4Tiles) else tiles.tiles
        assert isinstance(tiles, Nvfp4Tiles)
        np.testing.assert_array_equal(np.asarray(tiles.numbers()), np.asarray(whole[name]))


@pytest.mark.parametrize("broken", [False, True])
def test_hopper_s_kernel_is_checked_at_start(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with the weights that the engine holds: attention's two matrices, and the experts' two."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    packed, _ = write_both(tmp_path, "modelopt", "mixtral_base", **sizes)
    kernels = Kernels(experts="mosaic_overlap", linear="mosaic")
    model, held = load_checkpoint(packed, BFLOAT16, quantization="auto", experts=kernels.experts, linear=kernels.linear)
    lay_out(held, linear=kernels.linear, experts=False)
    if broken:
        right = call.grouped_matmul
        monkeypatch.setattr(call, "grouped_matmul", lambda *args, **more: right(*args, **more) * 1.5)
        jax.clear_caches()  # type: ignore[no-untyped-call]  # the right kernel may have been traced
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    with interpreted(), quick_compiles():
        arguments = model, held, KVLayout.of(model, 16), limits, [Bucket(2, 2, decode=True)], kernels
        if broken:
            with pytest.raises(KernelError, match=r"layers\.0\.\w+\.\w+, 2 tokens"):
                check_kernels(*arguments, np.dtype(BFLOAT16))
        else:
            assert check_kernels(*arguments, np.dtype(BFLOAT16)) == 4


def test_hopper_s_kernels_agree_with_xla(tmp_path: Path) -> None:
    """Linear layers and experts: the kernels are interpreted, and logits differ by rounding to bfloat16."""
    packed, _ = write_both(tmp_path, "modelopt", "mixtral_base", num_hidden_layers=1, **SMALL)
    model, plain = load_checkpoint(packed, BFLOAT16, quantization="auto")
    tiled = load(packed, dtype=BFLOAT16, experts="mosaic_overlap", linear="mosaic")
    lay_out(tiled, linear="mosaic", experts=False)
    assert sum(name.endswith(TILES) for name in tiled) == 4
    with quick_compiles(), interpreter.interpreted():
        expected = dense_logits(model, plain, TOKENS[:4]).astype(np.float32)
        got = dense_logits(model, tiled, TOKENS[:4], experts="mosaic_overlap").astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-5 * np.abs(expected).max())


def test_what_does_not_fit_tiles_is_an_error(tmp_path: Path) -> None:
    """Sides of whole tiles."""
    packed, _ = write_both(tmp_path, "modelopt", "mixtral_base", intermediate_size=96)
    with pytest.raises(ConfigError, match=r"in NVFP4 does not fit multiples of 64: must be xla"):
        load(packed, dtype=BFLOAT16, experts="mosaic_overlap")


def test_devices_share_no_group_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 groups each of 4 devices would have one and a half."""
    monkeypatch.setattr(Placement, "input_shards", lambda *_: 4)
    assert READING.fitted is not None
    placement = Placement(make_model())
    for inputs, error, limit in (
        (96, ConfigError, "tensor_parallel_size = 4: must divide 6, the groups of 16 inputs of layer"),
        (40, CheckpointError, "layer in NVFP4 has 40 inputs: must be a multiple of 16"),
    ):
        arrays = {f"layer.{CODES}": np.zeros((inputs // 2, 10), np.uint8)}
        shape: Any = jax.ShapeDtypeStruct((inputs, 10), FLOAT32)  # type: ignore[no-untyped-call]
        with pytest.raises(error, match=limit):
            READING.fitted("layer", arrays, shape, placement, "xla")
