"""The Python API on `tiny`: prompts, results, streams, and errors."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jswa
from jswa.errors import GenerationError
from jswa.llm import LLM
from jswa.storage.hub import TINY
from jswa.types import RequestOutput, SamplingParams
from tests.support.tiny import ONE_SHAPE, SHAPES

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One engine for the whole module."""
    with LLM("tiny", **SHAPES) as model:
        yield model


@pytest.fixture(autouse=True)
def left_empty(llm: LLM) -> Iterator[None]:
    """After every test, no page is in use and no request is left."""
    yield
    while llm.engine.has_work():
        llm.engine.step()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)
    assert stats.free_slots + stats.cached_slots == stats.total_slots
    assert llm.num_unfinished == 0


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the generated ids of each prompt."""
    return [output.outputs[0].token_ids for output in outputs]


def test_every_form_of_a_prompt_gives_the_same_text(llm: LLM) -> None:
    """A string, its ids, an array, or vLLM's dictionaries, alone or in a list."""
    assert llm.tokenizer is not None
    text = "The cat"
    ids = llm.tokenizer.encode(text).tolist()
    forms: list[Any] = [text, [text], ids, [ids], np.array(ids), [np.array(ids, np.int64)]]
    forms += [{"prompt": text}, [{"prompt_token_ids": ids}]]
    results = [llm.generate(form, **GREEDY) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert all(ids_of(result) == ids_of(results[0]) for result in results)
    assert results[0][0].prompt == text
    assert results[2][0].prompt is None
    assert all(result[0].prompt_token_ids == ids for result in results)


def test_results_are_in_input_order_and_have_vllms_fields(llm: LLM) -> None:
    """More prompts than max_num_seqs, of different lengths: the last ones wait until others have finished."""
    prompts = ["One day", "A", "There was a bird " * 8, "Once upon a time", "The cat", "B"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert len(completion.token_ids) == 9
        assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
        assert output.prefix is not None
        assert output.num_cached_tokens == output.prefix.cached_tokens < output.prefix.prompt_tokens
        assert output.metrics is not None
        assert output.metrics.first_token_time is not None
        assert output.metrics.finished_time is not None
        assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time
        assert output.metrics.first_scheduled_time is not None
        assert output.metrics.arrival_time <= output.metrics.first_scheduled_time <= output.metrics.first_token_time
    waits = [output.metrics.time_in_queue or 0.0 for output in outputs if output.metrics is not None]
    assert min(waits[4:]) > max(waits[:4])


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    """As a list of SamplingParams, one per prompt."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 1, 7)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(ids) for ids in ids_of(outputs)] == [3, 1, 7]


def test_a_stream_gives_the_same_as_a_call(llm: LLM) -> None:
    """The pieces of text and ids of each prompt, joined, are the whole result."""
    prompts = ["Once upon a time", "The cat", "One day, a small"]
    whole = llm.generate(prompts, temperature=0.8, seed=5, max_tokens=40, use_tqdm=False)
    text: dict[str, str] = {}
    ids: dict[str, list[int]] = {}
    finished = []
    for piece in llm.generate(prompts, temperature=0.8, seed=5, max_tokens=40, stream=True):
        assert piece.request_id not in finished
        text[piece.request_id] = text.get(piece.request_id, "") + piece.outputs[0].text
        ids.setdefault(piece.request_id, []).extend(piece.outputs[0].token_ids)
        if piece.finished:
            finished.append(piece.request_id)
            assert piece.outputs[0].finish_reason in ("length", "stop")
    assert list(ids.values()) == ids_of(whole)
    assert list(text.values()) == [output.outputs[0].text for output in whole]
    assert llm.tokenizer is not None
    assert list(text.values()) == [llm.tokenizer.decode(piece) for piece in ids.values()]


def test_interleaved_streams_get_their_own_tokens(llm: LLM) -> None:
    """Two iterators are advanced in turn, with a call in between."""
    alone = {prompt: ids_of(llm.generate(prompt, **GREEDY))[0] for prompt in ("The cat", "One day", "There was")}
    first = llm.generate("The cat", temperature=0, max_tokens=12, stream=True)
    second = llm.generate("One day", temperature=0, max_tokens=12, stream=True)
    got: dict[str, list[int]] = {"The cat": next(first).outputs[0].token_ids, "One day": []}
    got["One day"] += next(second).outputs[0].token_ids
    assert ids_of(llm.generate("There was", **GREEDY)) == [alone["There was"]]
    for piece in first:
        got["The cat"] += piece.outputs[0].token_ids
    for piece in second:
        got["One day"] += piece.outputs[0].token_ids
    assert got == {prompt: alone[prompt] for prompt in got}


def test_a_closed_stream_frees_its_pages(llm: LLM) -> None:
    """Closing the iterator aborts its requests."""
    stream = llm.generate(["Once upon", "One day"], max_tokens=200, stream=True, ignore_eos=True)
    next(stream)
    assert llm.stats().full_pages > 0
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert llm.stats().full_pages == 0


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(llm: LLM) -> None:
    """The draw depends on seed, position and logits only."""
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=1234, max_tokens=20)
    alone = ids_of(llm.generate("The cat", params, use_tqdm=False))[0]
    crowd = llm.generate(["One day", "The cat", "Once", "The cat"], params, use_tqdm=False)
    assert ids_of(crowd)[1] == alone
    assert ids_of(crowd)[3] == alone
    other = dataclasses.replace(params, seed=1235)
    assert ids_of(llm.generate("The cat", other, use_tqdm=False))[0] != alone


def test_requests_without_a_seed_get_different_texts(llm: LLM) -> None:
    """Even for the same prompt in the same call."""
    first, second = ids_of(llm.generate(["The cat"] * 2, temperature=1.0, max_tokens=30, use_tqdm=False))
    assert first != second


def test_stop_token_ids_end_the_text_and_are_named(llm: LLM) -> None:
    """finish_reason is "stop" and stop_reason the id; the id is in token_ids but not in the text."""
    free = llm.generate("The cat", temperature=0, max_tokens=12, ignore_eos=True, use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    out = llm.generate("The cat", temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], use_tqdm=False)
    completion = out[0].outputs[0]
    assert completion.token_ids == free.token_ids[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert llm.tokenizer is not None
    assert completion.text == llm.tokenizer.decode(free.token_ids[:first])


def test_generation_stops_at_max_model_len(llm: LLM) -> None:
    """Without max_tokens, generation fills the context; the last token is sampled but not run through the model."""
    prompt = [70] * 500
    completion = llm.generate(prompt, temperature=0, ignore_eos=True, use_tqdm=False)[0].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    longest = llm.generate([70] * 511, temperature=0, ignore_eos=True, use_tqdm=False)[0].outputs[0]
    assert len(longest.token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "kind", "field"),
    [
        ("", jswa.InvalidPrompt, "prompt"),
        ([], jswa.InvalidPrompt, "prompt"),
        ([1, -2], jswa.InvalidToken, "prompt token id"),
        ([1, 1024], jswa.InvalidToken, "prompt token id"),
        ([1, 2**40], jswa.InvalidToken, "prompt token id"),
        ([1, 2**70], jswa.InvalidToken, "prompt token id"),
        ([70] * 512, jswa.PromptTooLong, "prompt"),
        ([1, 2.5], jswa.InvalidPrompt, "prompt"),
        ({"text": "a"}, jswa.InvalidPrompt, "prompt"),
        ([1, True], jswa.InvalidPrompt, "prompt"),
        (b"bytes", jswa.InvalidPrompt, "prompt"),
        (None, jswa.InvalidPrompt, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_finish(
    llm: LLM, prompt: Any, kind: type[jswa.RequestError], field: str
) -> None:
    """The error names field, value and limit, and carries the results of the other prompts."""
    good = ids_of(llm.generate(["The cat", "One day"], **GREEDY))
    with pytest.raises(kind) as caught:
        llm.generate(["The cat", prompt, "One day"], **GREEDY)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.field, error.index) == (field, 1)
    assert error.limit
    assert error.outputs[1] is None
    assert [output.outputs[0].token_ids for output in error.outputs if output is not None] == good
    assert error.errors == {1: error}


def test_a_stream_raises_the_error_of_a_refused_prompt(llm: LLM) -> None:
    """Pieces of the valid prompt may come first."""
    pieces: list[RequestOutput] = []
    with pytest.raises(jswa.InvalidToken):
        pieces.extend(llm.generate([[1, 1999], [1, 70]], temperature=0, max_tokens=4, stream=True))
    assert len([piece for piece in pieces if piece.finished]) <= 1
    assert llm.generate([[1, 70]], temperature=0, max_tokens=4, use_tqdm=False)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_new_tokens"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_bad_sampling_parameters_are_refused_by_name(llm: LLM, keywords: dict[str, Any], field: str) -> None:
    """Nothing runs, and the error names the parameter."""
    with pytest.raises(jswa.InvalidSampling) as caught:
        llm.generate("The cat", use_tqdm=False, **keywords)
    assert caught.value.field == field


def test_max_new_tokens_means_max_tokens(llm: LLM) -> None:
    """It is Hugging Face's name."""
    assert len(ids_of(llm.generate("The cat", max_new_tokens=3, ignore_eos=True, use_tqdm=False))[0]) == 3


def test_nan_logits_fail_one_request_only(llm: LLM) -> None:
    """With a NaN embedding of token 200, a prompt with this token fails; then another one gives the same as before."""
    runner: Any = llm.engine.runner
    embed = runner.params["embed"]
    good = ids_of(llm.generate([[1, 70, 71]], **GREEDY))
    # The embedding is tied to the output head, so no other prompt may run while it is NaN.
    try:
        runner.params = {**runner.params, "embed": embed.at[200].set(jnp.nan)}
        with pytest.raises(GenerationError):
            llm.generate([[1, 200]], **GREEDY)
    finally:
        runner.params = {**runner.params, "embed": embed}
    assert ids_of(llm.generate([[1, 70, 71]], **GREEDY)) == good


def test_a_checkpoint_without_a_tokenizer_accepts_only_ids(tmp_path: Path) -> None:
    """Text is refused and the error says why; with ids, the text of the result is empty."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    with LLM(tmp_path, **ONE_SHAPE) as model:
        assert model.tokenizer is None
        output = model.generate([1, 70, 71], temperature=0, max_tokens=4, ignore_eos=True, use_tqdm=False)[0]
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
        with pytest.raises(jswa.InvalidPrompt, match=r"tokenizer\.json"):
            model.generate("text", use_tqdm=False)
    model.close()
    with pytest.raises(jswa.EngineError, match="closed"):
        model.generate([1, 2], use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_model_len": 4097}, "max_model_len"),
        ({"max_modellen": 64}, "max_modellen"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 10**6, "max_model_len": 2000}, "max_model_len"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"dtype": "int8"}, "dtype"),
        ({"prefix_cache": "no"}, "prefix_cache"),
        ({"block_size": 0}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_a_bad_engine_option_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    """ConfigError is raised before anything is compiled."""
    with pytest.raises(jswa.ConfigError) as caught:
        LLM("tiny", **options)
    assert caught.value.field == field


def test_a_model_that_is_not_a_folder_is_refused() -> None:
    """It is not asked of the hub either, since no id has two slashes."""
    with pytest.raises(jswa.CheckpointError, match="no/such/model"):
        LLM("no/such/model")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    """UnsupportedModel names the requested architecture and the known ones."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(jswa.UnsupportedModel, match=r"'t5'.*gemma3_text"):
        LLM(tmp_path)
