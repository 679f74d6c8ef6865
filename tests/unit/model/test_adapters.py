"""LoRA adapters in the decoder (jswa/model/adapters.py, low_rank.py): the model with its weights merged."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.architecture import ModelConfig
from jswa.model.adapters import Adapters, check_adapters, load_adapters
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params, bind
from jswa.model.weights.hold import Mode
from jswa.model.weights.load import load_checkpoint
from pallas_kernels.quantized import Quantized, dequantized
from tests.parity.load import Fixture, adapter_names, load_adapter, load_fixture
from tests.parity.sketch import sketch
from tests.parity.weights import write_checkpoint
from tests.support.adapters import ATTENTION, DENSE, Lora, random_lora, save
from tests.support.oracles import dense_attention, dense_logits, quick_compiles

FLOAT32 = jnp.dtype("float32")
PROMISED = 2e-4
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("llama_gqa", DENSE),
    ("phi3_base", FUSED),  # q, k, v in one matrix, gate and up in another
    ("gemma4_text_k_eq_v_no_key_heads", DENSE),  # rows and columns of attention in another order
    ("qwen3_base", ("q_proj", "up_proj", "down_proj")),
]
NIGHTLY = [
    ("gemma3_text_p6", DENSE),
    ("gemma3_wrapped", DENSE),
    ("gpt_oss_base", ATTENTION),
    ("gemma3n_text_base", DENSE),  # layers without keys of their own, and a tail
    ("afmoe_base", DENSE),  # a gate in attention, shared experts
    ("dots1_base", DENSE),
]


@pytest.fixture(autouse=True, scope="module")
def _unoptimised() -> Iterator[None]:
    with quick_compiles():
        yield


@pytest.mark.parametrize("name", adapter_names())
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Folders as PEFT saves them: its names, its patterns of ranks and scales, its targets."""
    fixture, adapter = load_fixture(name), load_adapter(name)
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
def test_adapters_beside_weights_of_8_bits(mode: Mode, tmp_path: Path) -> None:
    """The same as beside those numbers as float32, with each adapter's A · B added."""
    fixture = load_fixture("llama_one_layer")
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    loras = {name: random_lora(fixture.tensors, DENSE, 3 + seed, seed=seed) for seed, name in enumerate("ab")}
    model, _, adapters = load(tmp_path, **loras)
    held = load_checkpoint(tmp_path, FLOAT32, quantization=mode)[1]
    for index in (0, 1, 2):
        merged = dict(held)
        adapted = [name for name in held if name.startswith("layers.") and name.endswith(".values")]
        for name in [name.removesuffix(".values") for name in adapted]:
            plain = dequantized(Quantized(merged.pop(f"{name}.values"), merged.pop(f"{name}.scales")), FLOAT32)
            a, b, owner = (adapters.params[f"{name}.lora_{what}"] for what in ("a", "b", "owner"))
            merged[name] = plain + a[:, owner == index] @ b[owner == index]
        expected = dense_logits(model, merged, fixture.tokens[:20])
        found = logits_with(model, held | adapters.params, fixture.tokens[:20], index)
        assert np.abs(found - expected).max() < PROMISED


def test_adapters_are_held_in_the_runs_type(tmp_path: Path) -> None:
    """Scaled in float32, and rounded once."""
    fixture = load_fixture("llama_one_layer")
    lora = random_lora(fixture.tensors, ("o_proj",), 3, seed=1, alpha=7)
    model = parse_config(fixture.config)
    found = check_adapters({"it": lora.write(tmp_path / "it")}, model)
    params = load_adapters(found, model, jnp.dtype("bfloat16")).params
    ((a, b),) = lora.updates.values()
    wanted = {"a": a.T, "b": b.T * np.float32(7 / 3)}
    for what, value in wanted.items():
        held = params[f"layers.0.attention.out.lora_{what}"]
        np.testing.assert_array_equal(np.asarray(held), value.astype(jnp.bfloat16))


def load(folder: Path, **loras: Lora) -> tuple[ModelConfig, Params, Adapters]:
    """A checkpoint, and adapters that are written beside it."""
    model, params = load_checkpoint(folder, FLOAT32)
    folders = {name: lora.write(folder / "adapters" / name) for name, lora in loras.items()}
    return model, params, load_adapters(check_adapters(folders, model), model, FLOAT32)


def logits_with(
    model: ModelConfig, params: Params, tokens: Int[np.ndarray, " T"], adapter: int
) -> Float[np.ndarray, "T V"]:
    """Of a text that runs with one of the adapters."""
    decoder = bind(model, params)
    ids = jnp.full(len(tokens), adapter, jnp.int32)
    hidden = decoder(jnp.asarray(tokens), jnp.arange(len(tokens)), dense_attention(model), adapters=ids)
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize(
    ("name", "modules"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_an_adapter_is_the_model_with_merged_weights(name: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    """Three adapters of different ranks and targets: each alone, and none, which is the model to the bit."""
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
        assert np.abs(merged - plain).max() > 0.05, "the adapter does something"
        assert np.abs(logits_with(model, both, tokens, index) - merged).max() < PROMISED
