"""Saving and loading the prefix cache: a restarted engine continues with it, or refuses it with the reason."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jswa
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.llm import LLM
from jswa.storage import page_copies, persist
from jswa.storage.identity import Identity, identity
from jswa.storage.snapshot import capture
from tests.support.nights import sample
from tests.support.oracles import small_model
from tests.support.prefix.saved import ENDS, FLOAT32, GREEDY, STORY, held, read, turn
from tests.support.tiny import ONE_SHAPE, SHAPES

pytestmark = pytest.mark.usefixtures("emptied")
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 512}


def test_a_restarted_engine_continues_with_the_saved_prefixes(llm: LLM, later: LLM, tmp_path: Path) -> None:
    """The next turn runs as few tokens as without the restart, and gets the tokens of a cold run."""
    saved = llm.save_cache(tmp_path / "cache")
    assert later.load_cache(tmp_path / "cache") == saved > 250
    assert held(later) == held(llm)
    prompts = [STORY, *(STORY + end + " he" for end in ENDS), STORY[:100] + "!", "Nobody knows this"]
    warm, again = (model.generate(prompts, **GREEDY) for model in (llm, later))
    with LLM("tiny", **SHAPES, prefix_cache=False) as cold_model:
        cold = cold_model.generate(prompts, **GREEDY)
    for one, other, plain in zip(warm, again, cold, strict=True):
        assert other.prefix == one.prefix
        assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    assert later.cache_stats().cached_tokens > 250
    later.engine.check()


def test_a_loaded_cache_is_bit_for_bit_the_saved_one(llm: LLM, later: LLM, saved: Path, tmp_path: Path) -> None:
    """If the engine that loaded it saves it again, the pages are the same, in some order."""
    later.load_cache(saved)
    later.save_cache(tmp_path / "cache")
    (one, first), (two, second) = read(llm, saved), read(llm, tmp_path / "cache")
    assert sorted(text.tokens.tolist() for text in one) == sorted(text.tokens.tolist() for text in two)
    for lane, other in zip(first, second, strict=True):
        assert sorted(row.tobytes() for row in lane) == sorted(row.tobytes() for row in other)


def test_a_cache_can_be_saved_and_loaded_while_requests_run(llm: LLM, later: LLM, tmp_path: Path) -> None:
    """Between any two steps; running and later requests get the same tokens."""
    prompts = [STORY + end + " and" for end in ENDS]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, **GREEDY)]
    got: dict[str, list[int]] = {}
    tokens = 0
    for number, piece in enumerate(later.generate(prompts, **{**GREEDY, "use_tqdm": True}, stream=True)):
        got.setdefault(piece.request_id, []).extend(piece.outputs[0].token_ids)
        if number % 17 == 5:
            tokens = later.save_cache(tmp_path / "cache")
            assert later.load_cache(tmp_path / "cache") == 0
        if number % 17 == 11:
            later.flush_cache()
            later.load_cache(tmp_path / "cache")
            later.engine.check()
    assert tokens > 0
    assert list(got.values()) == expected
    later.flush_cache()
    assert later.load_cache(tmp_path / "cache") == tokens
    assert [output.outputs[0].token_ids for output in later.generate(prompts, **GREEDY)] == expected


def test_loading_keeps_cached_texts_and_adds_the_others(llm: LLM, later: LLM, saved: Path) -> None:
    """Loading into a cache in use; loading it again adds nothing."""
    turn(later, STORY[:150] + " But then")
    mine = later.generate(STORY[:150] + " But then", **GREEDY)[0]
    added = later.load_cache(saved)
    assert 0 < added < llm.save_cache(saved.parent / "again")
    assert later.load_cache(saved) == 0
    again = later.generate(STORY[:150] + " But then", **GREEDY)[0]
    assert again.outputs[0].token_ids == mine.outputs[0].token_ids
    assert again.prefix == mine.prefix
    later.engine.check()


def test_each_salt_is_saved_separately(later: LLM, tmp_path: Path) -> None:
    """A saved cache has texts of one salt, and does not contain the salt itself."""
    turn(later, STORY, cache_salt="sesame")
    assert later.save_cache(tmp_path / "plain") == 0
    tokens = later.save_cache(tmp_path / "cache", cache_salt="sesame")
    later.flush_cache()
    with pytest.raises(jswa.CacheFileError, match="salt"):
        later.load_cache(tmp_path / "cache")
    assert later.load_cache(tmp_path / "cache", cache_salt="sesame") == tokens > 80
    assert later.generate(STORY, **GREEDY)[0].num_cached_tokens == 0
    assert (later.generate(STORY, **GREEDY, cache_salt="sesame")[0].num_cached_tokens or 0) > 50
    assert not any(b"sesame" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_an_empty_cache_can_be_saved_and_loaded(later: LLM, tmp_path: Path) -> None:
    """Saved under a salt that no request has used."""
    assert later.save_cache(tmp_path / "cache", cache_salt="nobody") == 0
    assert later.load_cache(tmp_path / "cache", cache_salt="nobody") == 0


OTHERS: dict[str, dict[str, Any]] = {
    "page_size": {"block_size": 8},
    "weights": {"load_format": "dummy"},
    "dtype": {"dtype": "bfloat16"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("field", sample(list(OTHERS), 4))
def test_a_cache_of_another_engine_is_refused_by_name(saved: Path, tmp_path: Path, field: str) -> None:
    """The error names the first difference with both values; the engine is unchanged, and can load its own cache."""
    with LLM("tiny", **SMALL, **OTHERS[field]) as other:
        before = held(other)
        with pytest.raises(jswa.CacheFileError, match=rf"cache: {field} of the cache is '.*', this engine's is '.*'"):
            other.load_cache(saved)
        assert held(other) == before
        text = other.generate(STORY, **GREEDY)[0].outputs[0].token_ids
        tokens = other.save_cache(tmp_path / "own")
        other.flush_cache()
        assert other.load_cache(tmp_path / "own") == tokens > 80
        again = other.generate(STORY, **GREEDY)[0]
        assert again.outputs[0].token_ids == text
        assert (again.num_cached_tokens or 0) > 50


def test_models_and_layouts_have_different_identities() -> None:
    """A changed number of the config, a changed weight and another layout each show in their own field."""
    model = small_model("LLFLLF")
    params = {"a": jnp.arange(1000.0).reshape(10, 100), "b": jnp.zeros(3)}

    def named(**changes: Any) -> Identity:
        parts: dict[str, Any] = {"model": model, "params": params, "page_size": 4, "salt": "", **changes}
        layout = KVLayout.of(parts["model"], parts["page_size"])
        limits = Limits(60, 4, 12, parts["page_size"], num_slabs=9)
        return identity(parts["model"], parts["params"], layout, FLOAT32, limits, parts["salt"])

    plain = named()
    assert named() == plain

    def differs(**changes: Any) -> str:
        return next(name for name, value in named(**changes).items() if value != plain.get(name))

    assert differs(model=dataclasses.replace(model, embed_scale=2.0)) == "model"
    assert differs(params={**params, "b": jnp.ones(3)}) == "weights"
    assert differs(params={**params, "b": jnp.zeros(3, jnp.bfloat16)}) == "weights"
    assert differs(params={**params, "c": jnp.zeros(3)}) == "weights"
    assert differs(params={**params, "a": params["a"].at[0, 16].set(0.5)}) == "weights"
    assert differs(page_size=8) == "page_size"
    assert differs(model=dataclasses.replace(model, context_devices=2)) == "decode_context_parallel_size"
    assert differs(salt="x") == "salt"


def test_an_engine_without_prefix_cache_refuses_to_save_and_load(saved: Path) -> None:
    """The ConfigError names the option."""
    with LLM("tiny", **ONE_SHAPE, prefix_cache=False) as model:
        for call in (model.save_cache, model.load_cache):
            with pytest.raises(jswa.ConfigError) as caught:
                call(saved)
            assert caught.value.field == "prefix_cache"


def test_saved_pages_contain_no_tokens_after_the_text(llm: LLM, tmp_path: Path) -> None:
    """Tokens after the end of a text in its last page may belong to another request."""
    llm.save_cache(tmp_path / "cache")
    _, contents = read(llm, tmp_path / "cache")
    engine: Any = llm.engine
    layout, (filled, _) = engine.layout, capture(engine.scheduler.cache.prefix, "").filled
    assert (filled < layout.page_size).any()
    for lane in contents:
        heads, width = layout.full.num_kv_heads, layout.full.row
        pages = lane[: len(filled)].reshape(len(filled), heads, layout.page_size, width)
        for page, tokens in zip(pages, filled.tolist(), strict=True):
            assert page[:, :tokens].any()
            assert not page[:, tokens:].any()


def test_the_cache_is_flushed_if_pages_cannot_be_written_to_the_device(
    saved: Path, later: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page whose contents are missing stays in the tree."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(later.engine.runner, "write_slots", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            later.load_cache(saved)
    assert later.cache_stats().full_pages == 0
    assert later.load_cache(saved) > 250
    assert jax.tree.leaves(later.engine.runner.state)  # type: ignore[attr-defined]


@contextmanager
def steps_go_on(model: LLM, expected: list[int]) -> Iterator[Callable[[], None]]:
    """Run a request again and again in another thread; yield a function that waits for ten more steps."""
    ended, got = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            got.append(list(model.generate(ENDS[0], **GREEDY)[0].outputs[0].token_ids))

    def wait() -> None:
        wanted, end = model.engine.step_stats().steps + 10, time.monotonic() + 60
        while model.engine.step_stats().steps < wanted:
            assert time.monotonic() < end, "the engine stands still"
            time.sleep(0.001)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        wait()
        yield wait
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()
    assert got == [expected] * len(got)


def test_steps_go_on_while_a_cache_is_saved_and_loaded(
    llm: LLM, later: LLM, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While files are hashed and written, read and checked, and between any two batches of pages."""
    expected = list(later.generate(ENDS[0], **GREEDY)[0].outputs[0].token_ids)
    save, load = persist.save, persist.load
    done: list[str] = []

    def watched(name: str, function: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            wait()
            done.append(name)
            return function(*arguments)

        return call

    with steps_go_on(later, expected) as wait, monkeypatch.context() as patch:
        patch.setattr(persist, "save", watched("save", save, wait))
        patch.setattr(persist, "load", watched("load", load, wait))
        patch.setattr(page_copies.SlotReading, "store", watched("pages", page_copies.SlotReading.store, wait))
        patch.setattr(page_copies, "BATCHES", 1)
        tokens = later.load_cache(saved)
        assert tokens > 250
        assert later.save_cache(tmp_path / "cache") >= tokens
    assert done.count("save") == done.count("load") == 1
    assert done.count("pages") > 2
    again = later.generate(STORY, **GREEDY)[0]
    assert again.prefix == llm.generate(STORY, **GREEDY)[0].prefix
    later.flush_cache()
    assert later.load_cache(tmp_path / "cache") >= tokens
    later.engine.check()


def test_two_saves_and_loads_of_one_engine_wait_for_each_other(later: LLM, saved: Path, tmp_path: Path) -> None:
    """From several threads: each is complete."""
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(later.load_cache, saved) for _ in range(3)]
        saves = [pool.submit(later.save_cache, tmp_path / str(n)) for n in range(2)]
        added = [load.result(60) for load in loads]
        written = [save.result(60) for save in saves]
    assert sorted(added)[:2] == [0, 0]
    later.flush_cache()
    assert max(added) == later.load_cache(saved)
    for number, tokens in enumerate(written):
        later.flush_cache()
        assert later.load_cache(tmp_path / str(number)) == tokens
