"""The decoder with LoRA adapters agrees with the model whose weights have the adapters merged."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.architecture import ModelConfig
from jswa.model.binding import bind
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.lora.files import AdapterWeights, check_adapters, load_adapters
from pallas_kernels.quantized import Quantized, dequantized
from tests.parity.load import Fixture, adapter_names, load_adapter, load_fixture
from tests.parity.sketch import sketch
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.adapters import ATTENTION, DENSE, Lora, random_lora, save
from tests.support.oracles import dense_attention, dense_logits, quick_compiles

FLOAT32 = jnp.dtype("float32")
PROMISED = 2e-4
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("llama_gqa", DENSE),
    ("phi3_base", FUSED),  # q, k, v are one matrix, gate and up another
    ("gemma4_text_k_eq_v_no_key_heads", DENSE),  # the loader reorders rows and columns of attention
    ("qwen3_base", ("q_proj", "up_proj", "down_proj")),
]
NIGHTLY = [
    ("gemma3_text_p6", DENSE),
    ("gemma3_wrapped", DENSE),
    ("gpt_oss_base", ATTENTION),
    ("gemma3n_text_base", DENSE),  # has layers with shared KV, and a tail
    ("afmoe_base", DENSE),  # has gated attention and shared experts
    ("dots1_base", DENSE),
]


@pytest.fixture(autouse=True, scope="module")
def _unoptimised() -> Iterator[None]:
    with quick_compiles():
        yield


@pytest.mark.parametrize("name", adapter_names())
def test_logits_agree_with_peft(name: str, tmp_path: Path) -> None:
    """Adapter folders are as PEFT saves them, with its names, rank and alpha patterns, and targets."""
    fixture, adapter = load_fixture(name.partition("+")[0]), load_adapter(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    (tmp_path / "adapter").mkdir()
    save(tmp_path / "adapter", adapter.tensors, adapter.config)
    model, params = load_checkpoint(tmp_path, FLOAT32)
    loaded = load_adapters(check_adapters({"it": tmp_path / "adapter"}, model), model, FLOAT32)
    found = logits_with(model, params | loaded.params, fixture.tokens, 1)
    assert np.abs(sketch(found) - adapter.sketch).max() < PROMISED
    plain = logits_with(model, params | loaded.params, fixture.tokens, 0)
    assert np.abs(sketch(plain) - fixture.sketch).max() < PROMISED


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_adapters_work_beside_weights_quantized_to_8_bits(mode: QuantizationMode, tmp_path: Path) -> None:
    """Logits agree with dequantized float32 weights to which the adapter's A · B is added."""
    fixture = load_fixture("llama_one_layer")
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    loras = {name: random_lora(fixture.tensors, DENSE, 3 + seed, seed=seed) for seed, name in enumerate("ab")}
    model, _, adapters = load(tmp_path, **loras)
    quantized = load_checkpoint(tmp_path, FLOAT32, quantization=mode)[1]
    for index in (0, 1, 2):
        merged = dict(quantized)
        adapted = [name for name in quantized if name.startswith("layers.") and name.endswith(".values")]
        for name in [name.removesuffix(".values") for name in adapted]:
            plain = dequantized(Quantized(merged.pop(f"{name}.values"), merged.pop(f"{name}.scales")), FLOAT32)
            a, b, owner = (adapters.params[f"{name}.lora_{what}"] for what in ("a", "b", "owner"))
            merged[name] = plain + a[:, owner == index] @ b[owner == index]
        expected = dense_logits(model, merged, fixture.tokens[:20])
        found = logits_with(model, quantized | adapters.params, fixture.tokens[:20], index)
        assert np.abs(found - expected).max() < PROMISED


def test_adapters_are_scaled_in_float32_and_cast_once(tmp_path: Path) -> None:
    """Parameters of adapters have the dtype of the model."""
    fixture = load_fixture("llama_one_layer")
    lora = random_lora(fixture.tensors, ("o_proj",), 3, seed=1, alpha=7)
    model = parse_config(fixture.config)
    checked = check_adapters({"it": lora.write(tmp_path / "it")}, model)
    params = load_adapters(checked, model, jnp.dtype("bfloat16")).params
    ((a, b),) = lora.updates.values()
    wanted = {"a": a.T, "b": b.T * np.float32(7 / 3)}
    for what, value in wanted.items():
        found = params[f"layers.0.attention.out.lora_{what}"]
        np.testing.assert_array_equal(np.asarray(found), value.astype(jnp.bfloat16))


def load(folder: Path, **loras: Lora) -> tuple[ModelConfig, Params, AdapterWeights]:
    """Load a checkpoint, and adapters that are written beside it."""
    model, params = load_checkpoint(folder, FLOAT32)
    folders = {name: lora.write(folder / "adapters" / name) for name, lora in loras.items()}
    return model, params, load_adapters(check_adapters(folders, model), model, FLOAT32)


def logits_with(
    model: ModelConfig, params: Params, tokens: Int[np.ndarray, " T"], adapter: int
) -> Float[np.ndarray, "T V"]:
    """Return the logits of a sequence that uses one of the adapters."""
    decoder = bind(model, params)
    ids = jnp.full(len(tokens), adapter, jnp.int32)
    hidden = decoder(jnp.asarray(tokens), jnp.arange(len(tokens)), dense_attention(model), adapters=ids)
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize(
    ("name", "modules"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_an_adapter_agrees_with_merged_weights(name: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    """Three adapters differ in ranks and targets; logits without an adapter equal the model's exactly."""
    fixture: Fixture = load_fixture(name)
    tokens = fixture.tokens[:40]
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    loras = {
        "one": random_lora(fixture.tensors, modules, 4, seed=1),
        "half": random_lora(fixture.tensors, modules[1:2], 3, seed=2, use_rslora=True),
        "all": random_lora(fixture.tensors, modules, 7, seed=3, alpha=11.5),
    }
    model, params, adapters = load(tmp_path, **loras)
    assert list(adapters.digests) == list(loras)
    plain = dense_logits(model, params, tokens)
    both = {**params, **adapters.params}
    np.testing.assert_array_equal(logits_with(model, both, tokens, 0), plain)
    for index, (label, lora) in enumerate(loras.items(), start=1):
        write_checkpoint(tmp_path / label, fixture.config, lora.merged(fixture.tensors))
        merged = dense_logits(model, load_checkpoint(tmp_path / label, FLOAT32)[1], tokens)
        assert np.abs(merged - plain).max() > 0.05, "the adapter must change the logits"
        assert np.abs(logits_with(model, both, tokens, index) - merged).max() < PROMISED
