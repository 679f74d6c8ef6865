"""Output that is held to a grammar, through the Python API on the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from jswa.errors import FormTooLarge, InvalidSampling
from jswa.llm import LLM
from jswa.sched.requests import Requests
from jswa.types import CompletionOutput, SamplingParams, StructuredOutputsParams
from tests.support import oracles
from tests.support.late import programs_compiled_when_run
from tests.support.tiny import SHAPES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind_of_animal": {"enum": ["cat", "dog"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "kind_of_animal", "friends"],
    "additionalProperties": False,
}
PROMPTS = ["Once upon a time", "The dog", "One day the sun was", "Tell me about a cat."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return one engine for the whole file."""
    with oracles.quick_compiles(), LLM("tiny", **SHAPES) as model:
        yield model


@pytest.fixture(autouse=True)
def left_empty(llm: LLM) -> Iterator[None]:
    """Check after each test that no page, no mask and no request is left."""
    yield
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    llm.engine.check()


def params(spec: dict[str, Any] | None, **more: Any) -> SamplingParams:
    """Return parameters of random texts, by default of 200 tokens at most."""
    form = None if spec is None else StructuredOutputsParams(**spec)
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 200, "structured_outputs": form, **more})


def texts(llm: LLM, given: Any, prompts: list[str] = PROMPTS) -> list[CompletionOutput]:
    """Return all texts of the prompts."""
    return [text for output in llm.generate(prompts, given, use_tqdm=False) for text in output.outputs]


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[CompletionOutput]:
    """Eight texts of `SCHEMA`."""
    return texts(llm, params({"json": SCHEMA}, n=2))


def test_every_answer_is_valid(llm: LLM, answers: list[CompletionOutput]) -> None:
    """It ends where the schema allows nothing more, with the token that completes it."""
    for answer in answers:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(answer.token_ids) == answer.text
    assert len({answer.text for answer in answers}) > 4


def test_forced_tokens_take_no_step(llm: LLM, answers: list[CompletionOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step for each of them the texts are the same, and there are more steps."""
    before = llm.engine.step_stats()
    assert [a.token_ids for a in texts(llm, params({"json": SCHEMA}, n=2))] == [a.token_ids for a in answers]
    between = llm.engine.step_stats()
    monkeypatch.setattr(Requests, "foretell", lambda self, sequence: [])
    assert [a.token_ids for a in texts(llm, params({"json": SCHEMA}, n=2))] == [a.token_ids for a in answers]
    after = llm.engine.step_stats()
    assert between.steps - before.steps < after.steps - between.steps


def test_a_forced_text_may_be_longer_than_a_step_takes() -> None:
    """Four rows have 16 tokens a step: the tokens that a grammar has foretold run in pieces."""
    told = "the dog and the cat were very good friends and they played in the park all day long"
    form = {"regex": f"({told} and (he|she) said: (yes|no) ){{2}}"}
    asked = [params(form, seed=seed, max_tokens=120) for seed in range(4)]
    shape: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4}
    with oracles.quick_compiles(), programs_compiled_when_run():
        with LLM("tiny", **shape, max_num_batched_tokens=16) as small:
            few = texts(small, asked)
            small.engine.check()
        with LLM("tiny", **shape, max_num_batched_tokens=256) as large:
            assert [text.token_ids for text in few] == [text.token_ids for text in texts(large, asked)]
    for text in few:
        assert text.finish_reason == "stop"
        assert text.text.count(told) == 2


@pytest.mark.parametrize("every", [1, 2, 5])
def test_preempted_rows_go_on_in_their_grammar(llm: LLM, answers: list[CompletionOutput], every: int) -> None:
    """A row that is preempted after every so many steps gives the text of one that is not."""
    engine, found = llm.engine, dict[str, list[int]]()
    assert llm.tokenizer is not None
    for number, prompt in enumerate(PROMPTS):
        ids = llm.tokenizer.encode(prompt)
        engine.add(engine.request(str(number), ids, params({"json": SCHEMA})))
        found[str(number)] = []
    steps = 0
    while engine.has_work():
        for event in engine.step():
            assert event.error is None
            if event.token is not None:
                found[event.request_id].append(event.token)
        engine.check()
        steps += 1
        running = engine.scheduler.running
        if steps % every == 0 and steps < 200 and running:
            engine.scheduler.preempt(running[steps % len(running)].request.request_id)
    assert list(found.values()) == [answer.token_ids for answer in answers[::2]]


def test_other_rows_keep_their_tokens(llm: LLM, answers: list[CompletionOutput]) -> None:
    """A row without a grammar, beside rows with one, and the reverse."""
    free = params(None, max_tokens=40, ignore_eos=True)
    alone = [text.token_ids for text in texts(llm, free)]
    mixed = texts(llm, [free if number % 2 else params({"json": SCHEMA}) for number in range(len(PROMPTS))])
    wanted = [alone[n] if n % 2 else answers[2 * n].token_ids for n in range(len(PROMPTS))]
    assert [text.token_ids for text in mixed] == wanted


def test_an_engine_without_overlap_gives_the_same_texts(
    answers: list[CompletionOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is finished before its own tokens are applied."""
    monkeypatch.setenv("JSWA_NO_OVERLAP", "1")
    with oracles.quick_compiles(), LLM("tiny", **SHAPES) as waits:
        assert [a.token_ids for a in texts(waits, params({"json": SCHEMA}, n=2))] == [a.token_ids for a in answers]


def test_log_probabilities_are_those_of_the_model(llm: LLM, answers: list[CompletionOutput]) -> None:
    """Each token has one, also a forced token, and it is that of the text as a prompt."""
    (answer,) = texts(llm, params({"json": SCHEMA}, logprobs=0), PROMPTS[:1])
    assert answer.token_ids == answers[0].token_ids
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert llm.tokenizer is not None
    ids = [*llm.tokenizer.encode(PROMPTS[0]).tolist(), *answer.token_ids]
    asked = SamplingParams(prompt_logprobs=0, max_tokens=1)
    output = llm.generate([ids], asked, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    known = output.prompt_logprobs[-len(answer.token_ids) :]
    for mine, token, entry in zip(answer.logprobs, answer.token_ids, known, strict=True):
        assert entry is not None
        assert mine[token].logprob == pytest.approx(entry[token].logprob, abs=1e-3)


def test_other_constraints_hold_too(llm: LLM) -> None:
    """Allowed tokens, bad words, a minimum of tokens, a stop string and a limit, each with a grammar."""
    digits = {"regex": "[0-9]{3,9}"}
    assert llm.tokenizer is not None
    three = llm.tokenizer.encode("3", add_special_tokens=False).tolist()[-1:]
    for text in texts(llm, params(digits, allowed_token_ids=[*three, 2], max_tokens=20)):
        assert set(text.text) == {"3"}
    for text in texts(llm, params(digits, bad_words=["33", "12", "21"], n=3)):
        assert not any(bad in text.text for bad in ("33", "12", "21"))
        assert text.text.isdecimal()
    assert all(len(text.token_ids) >= 4 for text in texts(llm, params(digits, min_tokens=4)))
    assert all(text.finish_reason == "length" for text in texts(llm, params({"regex": "[a-z]{300}"}, max_tokens=7)))
    for text in texts(llm, params({"choice": ["yes, it is", "yes, it is not"]}, stop="is")):
        assert (text.text, text.stop_reason) == ("yes, it ", "is")
    story = "Once there was a long story about a cat"  # the stop string is among tokens that are forced together
    for text in texts(llm, params({"choice": [story]}, stop="story", n=2)):
        assert (text.text, text.stop_reason) == ("Once there was a long ", "story")


def test_constraints_that_leave_nothing_are_an_error_of_their_request(llm: LLM) -> None:
    """The error names both; the row beside it goes on."""
    # The end token is allowed, which may not come first.
    mine = params({"regex": "[a-z]+"}, allowed_token_ids=[2])
    failed, other = llm.generate(PROMPTS[:2], [mine, params({"choice": ["yes"]})], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "allowed_token_ids and structured_outputs" in str(failed.error)
    assert other.outputs[0].text == "yes"


def test_a_text_whose_form_is_too_ambiguous_ends_alone(llm: LLM) -> None:
    """With an error that names the limit; other texts go on, and the form can be asked for again."""
    ambiguous = {"grammar": 'start: e\ne: e e e | e e | "a" | ""'}
    assert llm.tokenizer is not None
    (token,) = llm.tokenizer.encode("a", add_special_tokens=False).tolist()
    for _ in range(2):
        mine = params(ambiguous, n=2, max_tokens=60, ignore_eos=True, logit_bias={token: 100.0})
        failed, other = llm.generate(PROMPTS[:2], [mine, params({"choice": ["yes"]})], use_tqdm=False)
        assert [text.finish_reason for text in failed.outputs] == ["error", "error"]
        assert isinstance(failed.error, FormTooLarge)
        assert "max is 300" in str(failed.error)
        assert other.outputs[0].text == "yes"


def test_a_form_that_no_text_has_is_refused_before_anything_runs(llm: LLM) -> None:
    """The error names the place in the schema."""
    wrong = {"type": "object", "properties": {"a": {"$ref": "https://example.org/b"}}, "required": ["a"]}
    with pytest.raises(InvalidSampling, match=r"/properties/a"):
        llm.generate("a", params({"json": wrong}), use_tqdm=False)
