"""Sampling features through the Python API on the embedded model, against dense logits and plain NumPy."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

import jswa
from jswa.llm import LLM
from jswa.model.binding import bind
from jswa.model.weights.load import load_checkpoint
from jswa.storage.hub import TINY
from jswa.types import CompletionOutput, Logprob, RequestOutput, SamplingParams
from tests.support import oracles
from tests.support.tiny import ONE_SHAPE, SHAPES

PROMPT = "Once upon a time"
EOS = 2
LONGEST = 128  # length of texts that the dense oracle is compiled for


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return one engine for the whole file; every test must leave it empty."""
    with oracles.quick_compiles(), LLM("tiny", **SHAPES) as model:
        yield model


@pytest.fixture(autouse=True)
def left_empty(llm: LLM) -> Iterator[None]:
    """Check after each test that no page, no logits state and no request is left."""
    yield
    while llm.engine.has_work():
        llm.engine.step()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)
    assert llm.num_unfinished == 0
    llm.engine.check()


def run(llm: LLM, prompt: Any = PROMPT, **keywords: Any) -> RequestOutput:
    """Run one prompt; by default greedily for 24 tokens, without an end token."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **keywords}
    outputs: list[RequestOutput] = llm.generate(prompt, use_tqdm=False, **options)
    return outputs[0]


def tokens_for(llm: LLM, ids: list[int], length: int) -> int:
    """Return how many of the tokens give `length` characters."""
    assert llm.tokenizer is not None
    return next(count for count in range(len(ids) + 1) if len(llm.tokenizer.decode(ids[:count])) >= length)


def says(llm: LLM, word: str, ids: list[int]) -> bool:
    """Return whether the tokens contain a word, with or without a space before it."""
    runs = [text_ids(llm, word), text_ids(llm, f" {word}")]
    return any(ids[at : at + len(run)] == run for run in runs for at in range(len(ids)))


def text_ids(llm: LLM, text: str) -> list[int]:
    """Return the tokens of a text, without special ones."""
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text, add_special_tokens=False).tolist()  # type: ignore[no-any-return]


@cache
def dense() -> Callable[[list[int]], Float[np.ndarray, "T V"]]:
    """Return a function from a text to its logits; texts are padded, so that one program is compiled."""
    model, params = load_checkpoint(TINY, jnp.dtype(jnp.float32))

    @jax.jit
    def padded(tokens: Any) -> Any:
        decoder = bind(model, params)
        return decoder.logits(decoder(tokens, jnp.arange(LONGEST), oracles.dense_attention(model)))

    return lambda ids: np.asarray(padded(np.array(ids + [0] * (LONGEST - len(ids)), np.int32)))[: len(ids)]


def log_softmax(logits: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    """Return log probabilities in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def check_entry(entry: dict[int, Logprob], token: int, logprobs: Float[np.ndarray, " V"], wanted: int) -> None:
    """Check an entry of log probabilities: the chosen token and the most likely ones, with rank, value and text."""
    assert next(iter(entry)) == token
    best = set(np.argsort(-logprobs)[:wanted].tolist())
    assert set(entry) == best | {token}
    for key, value in entry.items():
        assert value.logprob == pytest.approx(logprobs[key], abs=2e-4)
        # Two unlikely tokens may be closer to each other than two programs' results.
        least, most = ((logprobs > logprobs[key] + by).sum() + 1 for by in (1e-4, -1e-4))
        assert least <= value.rank <= most
        assert isinstance(value.decoded_token, str)


def test_n_texts_of_a_seeded_request_have_consecutive_seeds(llm: LLM) -> None:
    """Text i has seed + i; also with more texts than rows, and around 2^64."""
    options: dict[str, Any] = {"temperature": 3.0, "max_tokens": 12}
    for seed, n in ((40, 6), (2**64 - 1, 2)):
        texts = run(llm, n=n, seed=seed, **options).outputs
        assert [text.index for text in texts] == list(range(n))
        alone = [run(llm, seed=(seed + i) % 2**64, **options).outputs[0] for i in range(n)]
        assert [text.token_ids for text in texts] == [text.token_ids for text in alone]
        assert [text.text for text in texts] == [text.text for text in alone]
        assert len({tuple(text.token_ids) for text in texts}) == n


def test_n_texts_without_a_seed_differ_and_greedy_ones_do_not(llm: LLM) -> None:
    """A stream gives the index of the text of each chunk."""
    random = run(llm, n=3, temperature=3.0).outputs
    assert len({tuple(text.token_ids) for text in random}) == 3
    greedy = run(llm, n=3).outputs
    assert len({tuple(text.token_ids) for text in greedy}) == 1
    texts, finished = ["", "", ""], []
    for piece in llm.generate(PROMPT, n=3, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True, stream=True):
        texts[piece.outputs[0].index] += piece.outputs[0].text
        finished.append(piece.finished)
    assert texts == [text.text for text in run(llm, n=3, temperature=1.0, seed=9, max_tokens=12).outputs]
    assert finished == [False] * (len(finished) - 1) + [True]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("where", [0, 7])
def test_a_stop_string_ends_the_text_and_is_never_shown(llm: LLM, where: int, include: bool) -> None:
    """A stop string may begin and end inside tokens."""
    free = run(llm).outputs[0]
    stop = free.text[where : where + 5]
    at = free.text.index(stop)
    options: dict[str, Any] = {"stop": ["\x00never", stop], "include_stop_str_in_output": include}
    found = run(llm, **options).outputs[0]
    assert found.text == free.text[: at + (5 if include else 0)]
    assert found.token_ids == free.token_ids[: tokens_for(llm, free.token_ids, at + 5)]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    shown = ""
    last: CompletionOutput | None = None
    for piece in llm.generate(PROMPT, stream=True, temperature=0, max_tokens=24, ignore_eos=True, **options):
        last = piece.outputs[0]
        shown += last.text
        assert found.text.startswith(shown)
    assert shown == found.text
    assert last is not None
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_the_beginning_of_a_stop_string_at_the_end_of_a_text_is_shown(llm: LLM) -> None:
    """The text reaches its length inside the stop string."""
    free = run(llm).outputs[0]
    found = run(llm, stop=free.text[-4:] + "\x00").outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (free.text, "length", None)
    exact = run(llm, stop=free.text[-9:]).outputs[0]
    assert (exact.text, exact.finish_reason) == (free.text[:-9], "stop"), "the last token completes the stop string"


def test_no_stop_token_is_generated_before_min_tokens(llm: LLM) -> None:
    """Greedy sampling takes the next best token instead; without ignore_eos the end token is forbidden too."""
    free = run(llm).outputs[0].token_ids
    stop = free[3]
    first = free.index(stop)
    prompt = run(llm).prompt_token_ids
    assert len(run(llm, stop_token_ids=[stop]).outputs[0].token_ids) == first + 1
    found = run(llm, stop_token_ids=[stop], min_tokens=10, ignore_eos=False).outputs[0].token_ids
    assert len(found) >= 10
    logits = dense()(prompt + found)[len(prompt) - 1 : -1].copy()
    logits[:10, [stop, EOS]] = -np.inf
    assert found == logits.argmax(axis=-1).tolist()
    assert stop not in found[:10]


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    """Greedy and at random; greedy sampling takes the best of them."""
    allowed = sorted({258, 31, 32, 33, *run(llm).outputs[0].token_ids[:3]})
    drawn = run(llm, allowed_token_ids=allowed, temperature=1.5, seed=1, n=3).outputs
    assert {token for text in drawn for token in text.token_ids} <= set(allowed)
    output = run(llm, allowed_token_ids=allowed)
    found, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    logits = dense()(prompt + found)[len(prompt) - 1 : -1]
    assert found == [allowed[i] for i in logits[:, allowed].argmax(axis=-1).tolist()]
    assert set(run(llm, allowed_token_ids=[258], max_tokens=3).outputs[0].token_ids) == {258}


def test_a_logit_bias_is_added_to_the_logits(llm: LLM) -> None:
    """+100 forces a token, -100 forbids one; a small bias has the effect that the dense logits predict."""
    free = run(llm).outputs[0].token_ids
    assert set(run(llm, logit_bias={77: 100.0}, max_tokens=5).outputs[0].token_ids) == {77}
    assert free[0] not in run(llm, logit_bias={free[0]: -100.0}).outputs[0].token_ids
    bias = {free[0]: -2.5, free[5]: 1.5}
    output = run(llm, logit_bias=bias)
    found, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    logits = dense()(prompt + found)[len(prompt) - 1 : -1].copy()
    for token, value in bias.items():
        logits[:, token] += value
    assert found == logits.argmax(axis=-1).tolist()


def test_bad_words_never_appear(llm: LLM) -> None:
    """Words of several tokens, of one, and overlapping ones; the greedy text changes only where one would end."""
    free = run(llm).outputs[0]
    word = free.text.split()[1]
    found = run(llm, bad_words=[word]).outputs[0]
    assert says(llm, word, free.token_ids)
    assert not says(llm, word, found.token_ids)
    before = free.text.index(f" {word} ")
    assert found.text[:before] == free.text[:before]
    words = [word, "the", "e", free.text.split()[2], "Tom and"]
    for text in run(llm, bad_words=words, temperature=1.0, seed=3, n=4, max_tokens=40).outputs:
        assert not [bad for bad in words if says(llm, bad, text.token_ids)]


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.7},
    ],
    ids=str,
)
def test_penalties_give_the_greedy_text_of_penalized_dense_logits(llm: LLM, penalties: dict[str, float]) -> None:
    """Each token has the largest logit after penalties for the prompt and the text so far, in float64."""
    output = run(llm, max_tokens=80, **penalties)
    found, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    logits = dense()(prompt + found)[len(prompt) - 1 : -1].astype(np.float64)
    repetition = penalties.get("repetition_penalty", 1.0)
    expected = []
    for index, row in enumerate(logits):
        text = found[:index]
        for token in set(prompt + text):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(text):
            row[token] -= penalties.get("presence_penalty", 0.0)
            row[token] -= penalties.get("frequency_penalty", 0.0) * text.count(token)
        expected.append(int(row.argmax()))
    assert found == expected
    assert found != run(llm, max_tokens=80).outputs[0].token_ids


@pytest.mark.parametrize(("wanted", "temperature"), [(0, 0.0), (3, 1.5), (20, 1.0)])
def test_logprobs_are_those_of_the_model_before_sampling_parameters(llm: LLM, wanted: int, temperature: float) -> None:
    """Before temperature, limits and penalties; a dictionary for each token; their sum is cumulative_logprob."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "top_k": 40, "repetition_penalty": 1.3}
    output = run(llm, logprobs=wanted, **options)
    completion, prompt = output.outputs[0], output.prompt_token_ids
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 24
    expected = log_softmax(dense()(prompt + completion.token_ids))[len(prompt) - 1 :]
    total = 0.0
    for token, entry, row in zip(completion.token_ids, completion.logprobs, expected[:-1], strict=True):
        check_entry(entry, token, row, wanted)
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is None
    assert completion.token_ids == run(llm, **options).outputs[0].token_ids, (
        "asking for log probabilities changes the tokens"
    )


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100])
def test_prompt_logprobs_are_those_of_the_model(llm: LLM, length: int) -> None:
    """None for the first token, then a dictionary for each, also if the prompt is run in chunks."""
    prompt = [1, *np.random.default_rng(length).integers(3, 259, length - 1).tolist()]
    output = run(llm, prompt, prompt_logprobs=2, max_tokens=2)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    expected = log_softmax(dense()(prompt))
    for index, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        check_entry(entry, prompt[index], expected[index - 1], 2)
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_requests_of_a_mixed_batch_get_the_tokens_that_they_get_alone(llm: LLM) -> None:
    """Requests with all kinds of sampling parameters beside plain ones."""
    plain = {"temperature": 0.9, "seed": 11, "max_tokens": 20, "ignore_eos": True}
    extras: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "logprobs": 2},
        {"min_p": 0.2, "bad_words": ["the", "a"]},
        {"prompt_logprobs": 3, "top_n_sigma": 1.0},
        {"temperature": 0},
        {"allowed_token_ids": [68, 100, 101, 35], "presence_penalty": 0.5},
        {"min_tokens": 5, "stop": "e", "logit_bias": {100: -3.0}},
        {},
    ]
    params = [SamplingParams(**{**plain, **extra}) for extra in extras]
    prompts = [PROMPT, "The cat", "One day, a small bird " * 4, "A", PROMPT, "The", "There was", "One day"]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        alone = llm.generate(prompt, one, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].text == alone.outputs[0].text


def test_errors_of_sampling_parameters_name_the_field(llm: LLM) -> None:
    """For ids outside the vocabulary, and if no token is left to generate; no request runs."""
    for field, keywords in (
        ("logit_bias", {"logit_bias": {1024: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [1024]}),
        ("stop_token_ids", {"stop_token_ids": [5, 1024]}),
        ("min_tokens", {"min_tokens": 3, "allowed_token_ids": [5], "stop_token_ids": [5]}),
        ("min_p", {"min_p": 1.5}),
        ("top_n_sigma", {"top_n_sigma": -2}),
        ("n", {"n": 0}),
        ("logprobs", {"logprobs": 21}),
        ("stop", {"stop": [""]}),
    ):
        with pytest.raises(jswa.InvalidSampling) as caught:
            run(llm, **keywords)
        assert caught.value.field == field


def test_a_row_without_an_allowed_token_fails_alone(llm: LLM) -> None:
    """The only allowed token is forbidden after itself: the request gets an error, and the row beside it continues."""
    (nine,) = text_ids(llm, "9")
    forbidden = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[nine], bad_words=["99"], ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    failed, fine = llm.generate([PROMPT, PROMPT], [forbidden, plain], use_tqdm=False)
    assert (failed.outputs[0].token_ids, failed.outputs[0].finish_reason) == ([nine], "error")
    assert isinstance(failed.error, jswa.NothingAllowed)
    assert "after 1 generated tokens no token is allowed: allowed_token_ids and bad_words" in str(failed.error)
    assert run(llm).prefix.cached_tokens > 0, "the prompt of both was taken out of the cache"  # type: ignore[union-attr]
    assert (len(fine.outputs[0].token_ids), fine.error) == (6, None)


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    """As in vLLM: stop strings in the first min_tokens tokens do not end the text."""
    free = run(llm).outputs[0]
    stop = free.text[2]
    assert run(llm, stop=stop).outputs[0].text == free.text[: free.text.index(stop)]
    assert llm.tokenizer is not None
    first = len(llm.tokenizer.decode(free.token_ids[:5]))
    waited = run(llm, stop=stop, min_tokens=5).outputs[0].text
    assert waited == (free.text[: free.text.index(stop, first)] if stop in free.text[first:] else free.text)


def test_generation_config_gives_defaults_for_keywords_but_not_for_sampling_params(tmp_path: Path) -> None:
    """Its values are used for keywords that are not given; SamplingParams are used as they are."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    defaults = {"temperature": 0.0, "repetition_penalty": 4.0, "max_new_tokens": 7, "top_k": None}
    original = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))
    (tmp_path / "generation_config.json").write_text(json.dumps({**original, **defaults}), encoding="utf-8")
    with LLM(tmp_path, **{**ONE_SHAPE, "max_model_len": 64}) as model:

        def ids(*args: Any, **keywords: Any) -> list[int]:
            outputs: list[RequestOutput] = model.generate(PROMPT, *args, use_tqdm=False, **keywords)
            return outputs[0].outputs[0].token_ids

        common: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
        expected = ids(SamplingParams(repetition_penalty=4.0, **common))
        free = ids(SamplingParams(**common))
        assert free != expected
        assert ids(ignore_eos=True) == expected[:7]
        assert ids(max_tokens=9, ignore_eos=True) == expected
        assert ids(max_new_tokens=9, ignore_eos=True) == expected, "max_new_tokens is another name of max_tokens"
        assert ids(repetition_penalty=1.0, ignore_eos=True) == free[:7]
        prompt = model.generate(PROMPT, use_tqdm=False)[0].prompt_token_ids
        assert len(ids(SamplingParams(temperature=0, ignore_eos=True))) == 64 - len(prompt)
