"""LoRA adapters in the whole engine: batches with several adapters, and a prefix cache for each of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jswa.architecture import ModelConfig
from jswa.errors import CacheFileError, RequestError
from jswa.llm import LLM
from jswa.model.binding import bind
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.hub import TINY
from jswa.text.detokenizer import StreamDecoder
from jswa.text.inputs import Prompt
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput
from server.core.service import Served
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.oracles import dense_attention, quick_compiles
from tests.support.server.harness import serve

LENGTH = 80
TOLERANCE = 2e-4  # docs/numerics.md
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "use_tqdm": False}
NAMES = (None, "a", "b")
OPTIONS: dict[str, Any] = {
    "max_model_len": LENGTH, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Setting:
    """A checkpoint with two adapters, an engine that has both, and the merged weights of each adapter."""

    folder: Path
    modules: dict[str, Path]
    llm: LLM
    model: ModelConfig
    merged: dict[str | None, Params]
    forward: Any

    def logits(self, lora: str | None, tokens: list[int]) -> Float[np.ndarray, "T V"]:
        """Return the logits of a text, by one dense forward of merged weights."""
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        out: Float[np.ndarray, "T V"] = np.asarray(self.forward(self.merged[lora], padded))
        return out[: len(tokens)]

    def check(self, lora: str | None, output: RequestOutput) -> None:
        """Assert that each token is the most likely one, up to rounding."""
        prompt, text = output.prompt_token_ids, list(output.outputs[0].token_ids)
        before = np.arange(len(prompt) - 1, len(prompt) + len(text) - 1)
        logits = self.logits(lora, prompt + text)
        assert (logits[before].max(axis=-1) - logits[before, text] < TOLERANCE).all()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Return a Gemma 3 model, which has sliding and full layers."""
    folder = tmp_path_factory.mktemp("lora")
    fixture = load_fixture("gemma3_text_p3_linear8")
    write_checkpoint(folder, fixture.config, fixture.tensors)
    loras = {
        "a": random_lora(fixture.tensors, DENSE, 4, seed=1),
        "b": random_lora(fixture.tensors, ("q_proj", "v_proj"), 2, seed=2),
    }
    modules = {name: lora.write(folder / name) for name, lora in loras.items()}
    float32 = jnp.dtype("float32")
    model, params = load_checkpoint(folder, float32)
    merged: dict[str | None, Params] = {None: params}
    for name, lora in loras.items():
        write_checkpoint(folder / f"merged_{name}", fixture.config, lora.merged(fixture.tensors))
        merged[name] = load_checkpoint(folder / f"merged_{name}", float32)[1]

    def run(params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
        decoder = bind(model, params)
        return decoder.logits(decoder(tokens, jnp.arange(LENGTH), dense_attention(model)))

    with quick_compiles():
        forward = jax.jit(run).lower(params, np.zeros(LENGTH, np.int32)).compile()
        llm = LLM(folder, lora_modules=modules, kv_cache_memory_bytes=1 << 20, **OPTIONS)
    with llm:
        yield Setting(folder, modules, llm, model, merged, forward)


def texts(setting: Setting, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts."""
    rng = np.random.default_rng(seed)
    found: list[list[int]] = rng.integers(3, setting.model.vocab_size, (count, length)).tolist()
    return found


def test_each_row_of_a_batch_gets_the_tokens_of_its_adapter(setting: Setting) -> None:
    """Rows with adapter a, b and none side by side, long prompts beside decoding rows; compared with merged weights."""
    setting.llm.flush_cache()
    prompts = texts(setting, 6, 37, seed=0)
    order = [NAMES[i % 3] for i in range(6)]
    asked = [{"prompt_token_ids": p, "lora": name} for p, name in zip(prompts, order, strict=True)]
    outputs = setting.llm.generate(asked, max_tokens=9, **GREEDY)
    for name, output in zip(order, outputs, strict=True):
        setting.check(name, output)
    setting.llm.flush_cache()
    alone = [setting.llm.generate([p], max_tokens=9, lora=n, **GREEDY) for p, n in zip(prompts, order, strict=True)]
    assert [one.outputs[0].token_ids for (one,) in alone] == [one.outputs[0].token_ids for one in outputs]


def test_pooled_hidden_states_are_those_of_the_adapter(setting: Setting) -> None:
    """The head's product with each is the logits of the merged weights; rows of all adapters are in one batch."""
    setting.llm.flush_cache()
    prompts = texts(setting, 3, 37, seed=9)
    asked = [{"prompt_token_ids": p, "lora": name} for p, name in zip(prompts, NAMES, strict=True)]
    with quick_compiles():
        outputs = setting.llm.generate(asked, max_tokens=1, pooling="last", **GREEDY)
    head = np.asarray(setting.merged[None]["embed"], np.float64)  # which Gemma shares with the embedding
    for prompt, name, output in zip(prompts, NAMES, outputs, strict=True):
        assert output.pooled is not None
        expected = setting.logits(name, prompt)[len(prompt) - 1]
        np.testing.assert_allclose(head @ output.pooled, expected, atol=TOLERANCE)


def test_prompt_logprobs_are_those_of_the_adapter(setting: Setting) -> None:
    """Prompt log probabilities run all tokens through all layers."""
    (prompt,) = texts(setting, 1, 40, seed=1)
    for name in NAMES:
        with quick_compiles():
            (scored,) = setting.llm.generate(prompt, max_tokens=1, prompt_logprobs=0, lora=name, **GREEDY)
        wide = setting.logits(name, prompt).astype(np.float64)
        expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        assert scored.prompt_logprobs is not None
        found = [one[prompt[i]].logprob for i, one in enumerate(scored.prompt_logprobs) if one is not None]
        np.testing.assert_allclose(found, expected[np.arange(39), prompt[1:]], atol=TOLERANCE)


def test_adapters_share_no_cached_prefixes(setting: Setting) -> None:
    """The same text with each adapter: nothing is cached at its first use, all of it later, also with salts."""
    setting.llm.flush_cache()
    (prompt,) = texts(setting, 1, 40, seed=2)
    for salt in ("", "tenant"):
        for turn in range(2):
            for name in NAMES:
                (output,) = setting.llm.generate([prompt], max_tokens=5, lora=name, cache_salt=salt, **GREEDY)
                assert (output.num_cached_tokens > 30) == (turn > 0)
                assert turn > 0 or output.num_cached_tokens == 0
                setting.check(name, output)


def test_no_salt_gives_access_to_the_cached_texts_of_an_adapter(setting: Setting) -> None:
    """Not even for a client that knows the adapter's digest and the form of the tree's roots."""
    setting.llm.flush_cache()
    (prompt,) = texts(setting, 1, 40, seed=3)
    setting.llm.generate([prompt], max_tokens=1, lora="a", cache_salt="x", **GREEDY)
    salt = f"\0{setting.llm.engine.adapters['a']}\0x"
    (output,) = setting.llm.generate([prompt], max_tokens=1, cache_salt=salt, **GREEDY)
    assert output.num_cached_tokens == 0
    setting.check(None, output)


def test_random_requests_in_little_memory_get_the_tokens_of_their_adapter(setting: Setting) -> None:
    """Shared prefixes under random adapters and salts, with preemption and eviction."""
    setting.llm.flush_cache()
    rng = np.random.default_rng(4)
    stems = texts(setting, 2, 60, seed=5)
    seen: set[tuple[int, str | None, str]] = set()
    for _ in range(4):
        asked: list[dict[str, Any]] = []
        for _ in range(8):
            stem, name, salt = int(rng.integers(2)), NAMES[rng.integers(3)], ("", "", "s")[rng.integers(3)]
            cut, tail = (
                int(rng.integers(30, 61)),
                rng.integers(3, setting.model.vocab_size, rng.integers(0, 6)).tolist(),
            )
            asked.append({"prompt_token_ids": stems[stem][:cut] + tail, "lora": name, "cache_salt": salt})
            seen.add((stem, name, salt))
        outputs = setting.llm.generate(asked, max_tokens=int(rng.integers(1, 12)), **GREEDY)
        for one, output in zip(asked, outputs, strict=True):
            setting.check(one["lora"], output)
    assert len(seen) > 8
    stats = setting.llm.cache_stats()
    assert stats.full_hit_tokens > 200
    assert stats.cached_tokens > 50


def test_an_unknown_adapter_is_refused_by_name(setting: Setting) -> None:
    """The other prompts of the call run."""
    (prompt,) = texts(setting, 1, 8, seed=6)
    both: list[Prompt] = [prompt, {"prompt_token_ids": prompt, "lora": "c"}]
    with pytest.raises(RequestError, match="lora = 'c': must be one of a, b") as refused:
        setting.llm.generate(both, max_tokens=2, **GREEDY)
    assert refused.value.index == 1
    assert refused.value.outputs[0].finished
    with pytest.raises(RequestError, match="lora = 3: must be a string"):
        setting.llm.generate([{"prompt_token_ids": prompt, "lora": 3}], max_tokens=2, **GREEDY)


def test_a_saved_cache_is_loaded_for_its_own_adapter_only(setting: Setting, tmp_path: Path) -> None:
    """For the same adapter under any name; with another adapter, or none, it is refused."""
    llm, (prompt,) = setting.llm, texts(setting, 1, 40, seed=7)
    llm.flush_cache()
    llm.generate([prompt], max_tokens=1, lora="a", **GREEDY)
    llm.generate([prompt[:20]], max_tokens=1, **GREEDY)
    assert llm.save_cache(tmp_path / "a", lora="a") == 40
    assert llm.save_cache(tmp_path / "none") == 20
    llm.flush_cache()
    with pytest.raises(CacheFileError, match="adapter of the cache"):
        llm.load_cache(tmp_path / "a", lora="b")
    with pytest.raises(CacheFileError, match=r"adapter of the cache is '.*', this engine's is None"):
        llm.load_cache(tmp_path / "a")
    with pytest.raises(CacheFileError, match="adapter of the cache is None"):
        llm.load_cache(tmp_path / "none", lora="a")
    assert llm.load_cache(tmp_path / "a", lora="a") == 40
    for name in NAMES:
        (output,) = llm.generate([prompt], max_tokens=3, lora=name, **GREEDY)
        assert (output.num_cached_tokens > 30) == (name == "a")
        setting.check(name, output)


def test_the_server_runs_the_adapter_that_a_request_names(setting: Setting) -> None:
    """Three names at once give the tokens of the engine."""
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    (prompt,) = texts(setting, 1, 20, seed=8)
    expected = [setting.llm.generate([prompt], max_tokens=12, lora=name, **GREEDY)[0] for name in NAMES]
    setting.llm.flush_cache()
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    with serve(Served(lambda: setting.llm.engine, tokenizer)) as client, ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda name: client.complete(**body, model=name), NAMES))
        assert client.refusal("/v1/completions", {**body, "model": "c"}, 404)["code"] == "model_not_found"
    for name, answer, output in zip(NAMES, answers, expected, strict=True):
        assert answer["model"] == (name or "fake")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        decoder = StreamDecoder(tokenizer, np.array(prompt, np.int32), skip_special_tokens=False)
        text = "".join(decoder.push(token) for token in output.outputs[0].token_ids) + decoder.finish()
        assert answer["choices"][0]["text"] == text
    assert len({answer["choices"][0]["text"] for answer in answers}) == 3
