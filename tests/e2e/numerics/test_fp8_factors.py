"""An engine whose linear layers multiply numbers of 8 bits: its life, and the options that it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jswa.errors import ConfigError
from jswa.llm import LLM
from jswa.storage.convert import convert
from jswa.storage.hub import TINY
from jswa.types import CompletionOutput
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.oracles import quick_compiles
from tests.support.tiny import ONE_SHAPE

OPTIONS: dict[str, Any] = {"quantization": "w8a8_fp8", "dtype": "float32", **ONE_SHAPE}
TEXT = np.random.default_rng(0).integers(3, 500, 40).tolist()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an engine of the embedded model, which runs all steps in one shape."""
    with quick_compiles(), LLM("tiny", **OPTIONS) as found:
        yield found


def ask(llm: LLM, *prompts: list[int], **more: Any) -> list[CompletionOutput]:
    """Return greedy texts of 8 tokens with their log probabilities."""
    given = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0, "use_tqdm": False, **more}
    return [output.outputs[0] for output in llm.generate(list(prompts), **given)]


def seen(output: CompletionOutput) -> list[tuple[int, float]]:
    """Tokens and their log probabilities."""
    assert output.logprobs is not None
    return [(token, table[token].logprob) for token, table in zip(output.token_ids, output.logprobs, strict=True)]


def test_a_text_does_not_depend_on_others_in_its_step(llm: LLM) -> None:
    """Alone, in a batch, and behind a cached prefix it has the same bits: a token's scale is its own."""
    (alone,) = ask(llm, TEXT)
    llm.flush_cache()
    batched = ask(llm, TEXT[:9], TEXT, TEXT[5:30])
    (cached,) = ask(llm, TEXT)
    assert seen(alone) == seen(batched[1]) == seen(cached)


def test_new_weights_and_sleep(llm: LLM) -> None:
    """Arrays and folders are rounded and laid out as at the start, and sleep frees and takes them again."""
    (first,) = ask(llm, TEXT)
    stored = load_file(TINY / "model.safetensors")
    llm.update_weights({name: jnp.asarray(value, jnp.float32) * 1.1 for name, value in stored.items()})
    assert seen(ask(llm, TEXT)[0]) != seen(first)
    llm.sleep(2)
    llm.update_weights(TINY)
    llm.wake()
    assert seen(ask(llm, TEXT)[0]) == seen(first)


@pytest.mark.nightly
def test_converted_checkpoints_and_adapters(llm: LLM, tmp_path: Path) -> None:
    """A checkpoint that was converted to fp8 gives the same text; an adapter changes the texts that name it alone."""
    convert(TINY, tmp_path / "converted", "float32", "fp8")
    adapter = random_lora(load_file(TINY / "model.safetensors"), DENSE, 4, seed=1).write(tmp_path / "adapter")
    with (
        quick_compiles(),
        LLM(tmp_path / "converted", **OPTIONS, lora_modules={"one": adapter}) as other,
    ):
        np.testing.assert_allclose(seen(ask(other, TEXT)[0]), seen(ask(llm, TEXT)[0]), atol=1e-5)
        assert seen(ask(other, TEXT, lora="one")[0]) != seen(ask(other, TEXT)[0])


def test_an_engine_without_float8_is_refused(tmp_path: Path) -> None:
    """A checkpoint in int8 is not rounded a second time."""
    convert(TINY, tmp_path, "float32", "int8")
    with pytest.raises(ConfigError, match="quantization = 'w8a8_fp8': no linear layer is held in float8"):
        LLM(tmp_path, **OPTIONS)


def test_products_of_linear_layers_cannot_be_named_beside() -> None:
    """Rounded factors have a kernel of their own."""
    with pytest.raises(ConfigError, match="kernels = 'linear=xla': must not be named with quantization = w8a8_fp8"):
        LLM("tiny", **{**OPTIONS, "kernels": "linear=xla"})
