"""LoRA adapters in the decoder (jswa/model/adapters.py, low_rank.py): the model with its weights merged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.architecture import ModelConfig
from jswa.model.adapters import Adapters, check_adapters, load_adapters
from jswa.model.load import load_checkpoint
from jswa.model.transformer import Params, bind
from tests.adapters import ATTENTION, DENSE, Lora, random_lora
from tests.oracles import dense_attention, dense_logits, quick_compiles
from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import write_checkpoint

FLOAT32 = jnp.dtype("float32")
PROMISED = 2e-4
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES: list[Any] = [
    ("llama_gqa", DENSE),
    ("gemma3_text_p6", DENSE),
    ("gemma3_wrapped", DENSE),
    ("qwen3_base", ("q_proj", "up_proj", "down_proj")),
    ("gpt_oss_base", ATTENTION),
    ("phi3_base", FUSED),
    ("gemma4_text_k_eq_v_no_key_heads", DENSE),
    ("gemma3n_text_base", DENSE),
    ("afmoe_base", (*DENSE, "gate_proj")),
]


@pytest.fixture(autouse=True, scope="module")
def _unoptimised() -> Iterator[None]:
    with quick_compiles():
        yield


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


@pytest.mark.parametrize(("name", "modules"), CASES, ids=[name for name, _ in CASES])
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
