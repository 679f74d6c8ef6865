"""Saving and loading the prefix cache: a restarted engine continues with it, or refuses it with the reason."""

import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jswa
from jswa.cache.layout import KVLayout
from jswa.llm import LLM
from jswa.storage import page_copies, persist
from jswa.storage.cache_store import cache_identity
from jswa.storage.snapshot import capture
from tests.support.oracles import small_model
from tests.support.tiny import ONE_SHAPE, SHAPES
from tests.support.turns import by_turns

SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 512}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "use_tqdm": False}
STORY = "Once upon a time there was a little girl who had a cat. The cat was big and liked to play in the garden. " * 2
ENDS = [" One day", " She said", " The dog"]
FLOAT32 = np.dtype("float32")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return the engine that saves, with a conversation of two turns and a few other texts in its cache."""
    with LLM("tiny", **SHAPES) as model:
        first = turn(model, STORY)
        turn(model, first + ENDS[0])
        model.generate([STORY + end for end in ENDS], **GREEDY)
        yield model


@pytest.fixture(scope="module")
def later() -> Iterator[LLM]:
    """Return an engine that was started later; its cache is empty at the start of each test."""
    with LLM("tiny", **SHAPES) as model:
        yield model


@pytest.fixture(autouse=True)
def emptied(later: LLM) -> None:
    """Empty the cache after each test."""
    later.flush_cache()


@pytest.fixture(scope="module")
def saved(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved cache; tests damage copies of it."""
    path = tmp_path_factory.mktemp("persist") / "cache"
    assert llm.save_cache(path) > 250
    return path


def turn(model: LLM, text: str, **more: Any) -> str:
    """Return the text with its continuation."""
    answer: str = model.generate(text, **GREEDY, **more)[0].outputs[0].text
    return text + answer


def identity_of(model: LLM, salt: str = "") -> persist.Identity:
    """Return the identity that a saved cache must have for this engine."""
    runner: Any = model.engine.runner
    return cache_identity(model.engine, runner, salt)


def read(model: LLM, path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the contents of a saved cache, which is checked."""
    engine = model.engine
    snapshot, contents = persist.load(path, identity_of(model), engine.layout, FLOAT32, engine.model.vocab_size)
    return {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot)}, contents


def held(model: LLM) -> tuple[int, ...]:
    """Return how much the cache holds, and how much of the arena is free."""
    stats, pool = model.cache_stats(), model.stats()
    return stats.full_pages, stats.local_pages, stats.windows, pool.free_slots, pool.cached_slots


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
    assert sum(one["length"]) == sum(two["length"])
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


@pytest.mark.parametrize("field", by_turns(list(OTHERS), 4))
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

    def named(**changes: Any) -> persist.Identity:
        parts: dict[str, Any] = {"model": model, "params": params, "page_size": 4, "salt": "", **changes}
        layout = KVLayout.of(parts["model"], parts["page_size"])
        return persist.identity(parts["model"], parts["params"], layout, FLOAT32, parts["salt"])

    plain = named()
    assert named() == plain

    def differs(**changes: Any) -> str:
        return next(name for name, value in named(**changes).items() if value != plain[name])

    assert differs(model=dataclasses.replace(model, embed_scale=2.0)) == "model"
    assert differs(params={**params, "b": jnp.ones(3)}) == "weights"
    assert differs(params={**params, "b": jnp.zeros(3, jnp.bfloat16)}) == "weights"
    assert differs(params={**params, "c": jnp.zeros(3)}) == "weights"
    assert differs(params={**params, "a": params["a"].at[0, 16].set(0.5)}) == "weights"
    assert differs(page_size=8) == "page_size"
    assert differs(salt="x") == "salt"


def test_an_engine_without_prefix_cache_refuses_to_save_and_load(saved: Path) -> None:
    """The ConfigError names the option."""
    with LLM("tiny", **ONE_SHAPE, prefix_cache=False) as model:
        for call in (model.save_cache, model.load_cache):
            with pytest.raises(jswa.ConfigError) as caught:
                call(saved)
            assert caught.value.field == "prefix_cache"


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a damage: a changed manifest with a right checksum."""

    def damage(path: Path) -> None:
        file = path / "manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest)
        manifest["sha256"] = persist.manifest_digest(manifest)
        file.write_text(json.dumps(manifest))

    return damage


def _replace_by(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / file).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (rewritten(lambda m: m["identity"].update(version="1")), "version of the cache is '1', this engine's is '2'"),
        (rewritten(lambda m: m["identity"].pop("weights")), "weights of the cache is None"),
        (rewritten(lambda m: m.update(identity=[1])), "version of the cache is None"),
        (rewritten(lambda m: m.update(arrays=None)), "checksum"),
        (rewritten(lambda m: m.update(files=None)), "does not belong there"),
        (rewritten(lambda m: m["files"].update({"../../etc/passwd": "0"})), "passwd is missing"),
        (rewritten(lambda m: m.update(arrays={})), "torn"),
        (rewritten(lambda m: m["arrays"].pop("tokens")), "torn"),
        (rewritten(lambda m: m["arrays"].pop("lane_000")), "torn"),
        (rewritten(lambda m: m["arrays"].update(evil=m["arrays"]["tokens"])), "lists arrays"),
        (rewritten(lambda m: m["arrays"].update(tokens=7)), "torn"),
        (rewritten(lambda m: m["arrays"]["tokens"].update(shape=[10**15])), "not those"),
        (rewritten(lambda m: m["arrays"]["tokens"].update(dtype="int64")), "'tokens' is torn"),
        (rewritten(lambda m: m["arrays"]["tokens"].pop("dtype")), "torn"),
        (rewritten(lambda m: m.update(format="something else")), "another's"),
        (_replace_by("manifest.json", b""), "torn"),
        (_replace_by("manifest.json", b"\xff\xfe"), "torn"),
        (_replace_by("manifest.json", b"[" * 100_000), "torn"),
        (_replace_by("manifest.json", b'{"format": ' + b"1" * 10_000 + b"}"), "torn"),
        (_replace_by("manifest.json", b"[1, 2]"), "not a saved cache"),
        (_replace_by("arrays/more", b"more"), "arrays/more is torn, or does not belong there"),
        (lambda path: shutil.rmtree(path / "arrays"), "missing"),
        (lambda path: shutil.rmtree(path), "not a saved cache"),
        (lambda path: (shutil.rmtree(path), path.write_bytes(b"a file")), "not a saved cache"),
    ],
)
def test_a_damaged_cache_is_refused_with_the_reason(
    saved: Path, later: LLM, tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    """The CacheFileError names the path; the engine is unchanged."""
    path = tmp_path / "cache"
    shutil.copytree(saved, path)
    damage(path)
    before = held(later)
    with pytest.raises(jswa.CacheFileError, match=reason) as caught:
        later.load_cache(path)
    assert str(path) in str(caught.value)
    assert held(later) == before
    assert later.generate(STORY, **GREEDY)[0].num_cached_tokens == 0


def damaged(content: bytes) -> Iterator[bytes]:
    """Yield half of a file, an empty file, and copies with one flipped bit."""
    yield content[: len(content) // 2]
    yield b""
    for at in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_nothing_is_loaded_if_any_file_is_torn(saved: Path, later: LLM, tmp_path: Path) -> None:
    """Each file in turn is deleted, cut and changed; the engine is unchanged and works."""
    path, before = tmp_path / "cache", held(later)
    shutil.copytree(saved, path)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(jswa.CacheFileError):
            later.load_cache(path)
        for damage in damaged(content):
            file.write_bytes(damage)
            with pytest.raises(jswa.CacheFileError, match=r"torn|another's|checksum|this engine's"):
                later.load_cache(path)
        file.write_bytes(content)
    assert held(later) == before
    assert later.load_cache(path) > 250
    later.engine.check()


def test_an_error_of_orbax_becomes_a_cache_file_error(saved: Path, later: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a cache whose checksums are right, but whose arrays cannot be read."""

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("NOT_FOUND: a chunk\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.Checkpointer.restore", fail)
        with pytest.raises(jswa.CacheFileError, match=r"cache: the cache is torn: ValueError: NOT_FOUND: a chunk$"):
            later.load_cache(saved)
    assert later.load_cache(saved) > 250


def test_a_cache_is_replaced_only_by_a_complete_one(
    llm: LLM, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving over a cache replaces it; if saving fails at any point, the old one is there and no other file is left."""
    path = tmp_path / "deep" / "cache"
    llm.save_cache(path)
    before = read(llm, path)[1]
    llm.save_cache(path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["cache"]
    rename, calls = Path.rename, []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    def fail_second(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no more renames")
        return rename(self, target)

    for place, name, failure in (
        (os, "fsync", fail),
        (persist.json, "dumps", fail),  # type: ignore[attr-defined]
        (Path, "rename", fail_second),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failure)
            with pytest.raises(jswa.CacheFileError, match=r"deep/cache: the cache cannot be saved: OSError"):
                llm.save_cache(path)
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["cache"]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(read(llm, path)[1], before, strict=True))


def test_only_caches_and_empty_folders_are_overwritten(llm: LLM, saved: Path, tmp_path: Path) -> None:
    """Other folders, files, and caches with an added file are refused."""
    other, file, mixed, empty = (tmp_path / name for name in ("other", "file", "mixed", "empty"))
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    file.write_text("text")
    shutil.copytree(saved, mixed)
    (mixed / "notes.txt").write_text("mine")
    for path in (other, file, mixed):
        with pytest.raises(jswa.CacheFileError, match=r"left alone|another's"):
            llm.save_cache(path)
    assert (other / "manifest.json").read_text() == "{}"
    assert file.read_text() == "text"
    assert (mixed / "notes.txt").read_text() == "mine"
    empty.mkdir()
    assert llm.save_cache(empty) > 250
    assert os.stat(empty).st_mode & 0o077 == 0, "other users can read the cache"
    for bad in ("\0", file / "below"):
        with pytest.raises(jswa.CacheFileError):
            llm.save_cache(bad)
        with pytest.raises(jswa.CacheFileError):
            llm.load_cache(bad)


def test_saved_pages_contain_no_tokens_after_the_text(llm: LLM, tmp_path: Path) -> None:
    """Tokens after the end of a text in its last page may belong to another request."""
    llm.save_cache(tmp_path / "cache")
    _, contents = read(llm, tmp_path / "cache")
    engine: Any = llm.engine
    layout, snapshot = engine.layout, capture(engine.scheduler.cache.prefix, "").snapshot
    filled = snapshot.filled(layout.page_size)
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
        patch.setattr(page_copies.Reading, "store", watched("pages", page_copies.Reading.store, wait))
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
