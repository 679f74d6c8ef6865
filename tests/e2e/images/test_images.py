"""Prompts with images on whole engines: the tokens and log probabilities of transformers, however the prompt is run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.engine import Engine
from jswa.errors import CheckpointError, InvalidPrompt, InvalidToken, RequestError
from jswa.images.picture import Picture
from jswa.images.tokens import image_ids
from jswa.llm import LLM
from jswa.plan import Request, TokenEvent
from jswa.storage.convert import convert
from jswa.types import SamplingParams
from tests.parity.images.load import GREEDY, PLACES, PROMPTS, ImageFixture, Prompt, load_images, names
from tests.parity.weights import write_checkpoint
from tests.support.late import programs_compiled_when_run
from tests.support.nights import sample
from tests.support.oracles import quick_compiles

SMALL = 72_000  # bytes of an arena
TOLERANCE = 2e-4  # docs/numerics.md
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 96}
SCORED = SamplingParams(temperature=0.0, max_tokens=GREEDY, ignore_eos=True, logprobs=0)


@pytest.fixture(params=sample(names(), 2), scope="module")
def fixture(request: pytest.FixtureRequest) -> ImageFixture:
    """A checkpoint of Gemma 4 with a tower, and what transformers computes for its prompts."""
    return load_images(request.param)


@pytest.fixture(scope="module")
def shared(fixture: ImageFixture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Its engine, with steps that are shorter than some images."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, fixture.config, fixture.tensors)
    with programs_compiled_when_run(), quick_compiles(), LLM(folder, kv_cache_memory_bytes=1 << 22, **SIZES) as llm:
        yield llm.engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The engine with an empty cache; the rows of images stay."""
    shared.flush_cache()
    return shared


def pictures_of(prompt: Prompt) -> list[Picture]:
    return [Picture(*one) for one in prompt.images]


def ids_of(prompt: Prompt, image: int) -> Int[np.ndarray, " P"]:
    """Return a prompt in which the ids of soft tokens are those of their images."""
    ids = prompt.ids[: prompt.length].copy()
    soft = [image_ids(one.digest, one.tokens) for one in prompt.images]
    ids[ids == image] = np.concatenate([np.zeros(0, np.int32), *soft])
    return ids


def requested(engine: Engine, name: str, prompt: Prompt, params: SamplingParams = SCORED) -> Request:
    assert engine.images is not None
    seen = engine.see(pictures_of(prompt))
    return engine.request(name, ids_of(prompt, engine.images.tokens.image), params, images=seen)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[TokenEvent]]:
    """Run requests together; return the events of their tokens."""
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            assert event.error is None
            events[event.request_id].append(event)
        engine.check()
    return events


def check_equal(prompt: Prompt, events: Sequence[TokenEvent]) -> None:
    """Assert that generated tokens and their log probabilities are those of transformers."""
    assert [event.token for event in events] == prompt.ids[prompt.length :].tolist()
    logits: Float[np.ndarray, "G V"] = prompt.logits[prompt.length - 1 : -1].astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for event, own in zip(events, scores, strict=True):
        assert event.logprobs is not None
        assert event.token is not None
        assert abs(event.logprobs.logprob - own[event.token]) < TOLERANCE


def scores_of(events: Sequence[TokenEvent]) -> Float[np.ndarray, " G"]:
    return np.array([event.logprobs.logprob for event in events if event.logprobs is not None])


def test_prompts_with_images_get_the_tokens_of_transformers(fixture: ImageFixture, engine: Engine) -> None:
    """One image, three, one that is longer than the window and than a step, and none: one by one, then together."""
    for name, prompt in fixture.prompts.items():
        check_equal(prompt, run(engine, [requested(engine, name, prompt)])[name])
    engine.flush_cache()
    together = run(engine, [requested(engine, name, prompt) for name, prompt in fixture.prompts.items()])
    for name, prompt in fixture.prompts.items():
        check_equal(prompt, together[name])
    assert set(together) == set(PROMPTS)


def test_an_image_is_found_in_the_cache_and_another_of_its_size_is_not(fixture: ImageFixture, engine: Engine) -> None:
    """The second turn does not encode the image again, and gets what a cold engine computes."""
    prompt, sight = fixture.prompts["long"], engine.sight
    assert sight is not None
    prompt = prompt._replace(images=tuple(one._replace(digest=b"of no other test") for one in prompt.images))
    encoded, hits = sight.encoder.encoded, sight.encoder.hits
    image, start = prompt.images[0], PLACES["long"][0] + 1
    first = requested(engine, "first", prompt)
    run(engine, [first])
    more = np.concatenate([first.prompt, prompt.ids[prompt.length :], np.array([7, 8, 9], np.int32)])
    again = engine.request("again", more, SCORED, images=engine.see(pictures_of(prompt)))
    found = run(engine, [again])["again"]
    assert found[0].prefix is not None
    assert found[0].prefix.full_hit_tokens >= prompt.length
    assert (sight.encoder.encoded - encoded, sight.encoder.hits - hits) == (1, 1)

    other = Picture(image.patches[::-1].copy(), image.positions, image.tokens, b"another digest")
    ids = more.copy()
    ids[start : start + image.tokens] = image_ids(other.digest, other.tokens)
    changed = run(engine, [engine.request("other", ids, SCORED, images=engine.see([other]))])["other"]
    assert changed[0].prefix is not None
    assert changed[0].prefix.full_hit_tokens <= start
    engine.flush_cache()
    cold = run(engine, [engine.request("cold", more, SCORED, images=engine.see(pictures_of(prompt)))])["cold"]
    assert np.abs(scores_of(cold) - scores_of(found)).max() < TOLERANCE
    assert np.abs(scores_of(cold) - scores_of(changed)).max() > 10 * TOLERANCE


def test_prompts_with_images_that_are_preempted_get_their_tokens(fixture: ImageFixture, tmp_path: Path) -> None:
    """The arena has room for few of them; those that were preempted run their images again."""
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    options = {**SIZES, "kv_cache_memory_bytes": SMALL, "prefix_cache": False}
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    with programs_compiled_when_run(), quick_compiles(), LLM(tmp_path, **options) as llm:
        engine = llm.engine
        requests = [
            requested(engine, f"{name} {n}", fixture.prompts[name], longer) for name in PROMPTS for n in range(2)
        ]
        found = run(engine, requests)
        assert engine.stats().preemptions > 0
    for request_id, events in found.items():
        check_equal(fixture.prompts[request_id.split()[0]], events[:GREEDY])


def test_images_come_back_from_host_memory_and_from_disk(fixture: ImageFixture, tmp_path: Path) -> None:
    """Other prompts take the arena in between; then the process starts anew with an empty host memory."""
    folder, disk = tmp_path / "model", tmp_path / "disk"
    folder.mkdir()
    write_checkpoint(folder, fixture.config, fixture.tensors)
    options = {**SIZES, "kv_cache_memory_bytes": SMALL, "host_kv_bytes": 1 << 20, "disk_kv": f"{disk}:64M"}
    prompt = fixture.prompts["long"]
    with programs_compiled_when_run(), quick_compiles():
        with LLM(folder, **options) as llm:
            check_equal(prompt, run(llm.engine, [requested(llm.engine, "first", prompt)])["first"])
            texts = [np.arange(3 + n, 83 + n, dtype=np.int32) for n in range(3)]
            run(llm.engine, [llm.engine.request(f"other {n}", text, SCORED) for n, text in enumerate(texts)])
            again = run(llm.engine, [requested(llm.engine, "again", prompt)])["again"]
            check_equal(prompt, again)
            assert again[0].prefix is not None
            assert again[0].prefix.host_tokens > 0
        with LLM(folder, **options) as llm:
            found = run(llm.engine, [requested(llm.engine, "found", prompt)])["found"]
    check_equal(prompt, found)
    assert found[0].prefix is not None
    assert found[0].prefix.disk_tokens > 0


def test_images_that_a_prompt_does_not_have_are_refused(fixture: ImageFixture, engine: Engine) -> None:
    prompt = fixture.prompts["one"]
    seen = engine.see(pictures_of(prompt))
    assert engine.images is not None
    ids = ids_of(prompt, engine.images.tokens.image)
    with pytest.raises(InvalidToken, match="must be in"):
        engine.request("none", ids, SCORED)
    with pytest.raises(InvalidPrompt, match="tokens of its images"):
        engine.request("twice", ids, SCORED, images=[*seen, *seen])
    with pytest.raises(InvalidPrompt, match="a token of text must follow"):
        engine.request("end", ids[: np.flatnonzero(ids < 0)[-1] + 1], SCORED, images=seen)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        engine.request("scored", ids, SamplingParams(max_tokens=1, prompt_logprobs=0), images=seen)


def test_a_checkpoint_without_its_tower_runs_on_text(fixture: ImageFixture, tmp_path: Path) -> None:
    """One whose tensors were left out, and a converted one; a tower that lacks a tensor is an error."""
    text = {name: tensor for name, tensor in fixture.tensors.items() if "language_model" in name}
    assert len(text) < len(fixture.tensors)
    (folder := tmp_path / "text").mkdir()
    write_checkpoint(folder, fixture.config, text)
    prompt = fixture.prompts["text"]
    with programs_compiled_when_run(), quick_compiles(), LLM(folder, kv_cache_memory_bytes=1 << 22, **SIZES) as llm:
        assert llm.engine.images is None
        with pytest.raises(RequestError, match="reads no images"):
            llm.engine.see(pictures_of(fixture.prompts["one"]))
        check_equal(prompt, run(llm.engine, [requested_text(llm.engine, prompt)])["text"])
    (whole := tmp_path / "whole").mkdir()
    write_checkpoint(whole, fixture.config, fixture.tensors)
    convert(whole, tmp_path / "converted")
    with LLM(tmp_path / "converted", kv_cache_memory_bytes=1 << 22, **SIZES) as llm:
        assert llm.engine.images is None
    lost = next(name for name in fixture.tensors if "vision_tower" in name)
    (broken := tmp_path / "broken").mkdir()
    write_checkpoint(broken, fixture.config, {name: own for name, own in fixture.tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match="vision_tower"):
        LLM(broken, kv_cache_memory_bytes=1 << 22, **SIZES)


def requested_text(engine: Engine, prompt: Prompt) -> Request:
    return engine.request("text", prompt.ids[: prompt.length], SCORED)
