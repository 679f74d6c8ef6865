"""A prefix cache that outlives its engine: saved, loaded, or refused with the reason."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jswa
from jswa.cache.layout import KVLayout
from jswa.llm import LLM
from jswa.storage import persist
from jswa.storage.cache_store import cache_identity
from jswa.storage.snapshot import capture
from tests.support.oracles import small_model

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512}
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 512}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "use_tqdm": False}
STORY = "Once upon a time there was a little girl who had a cat. The cat was big and liked to play in the garden. " * 2
ENDS = [" One day", " She said", " The dog"]
FLOAT32 = np.dtype("float32")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The engine that saves: a conversation of two turns and a few texts beside it."""
    with LLM("tiny", **OPTIONS) as model:
        first = turn(model, STORY)
        turn(model, first + ENDS[0])
        model.generate([STORY + end for end in ENDS], **GREEDY)
        yield model


@pytest.fixture(scope="module")
def later() -> Iterator[LLM]:
    """An engine that started later; each test finds it empty."""
    with LLM("tiny", **OPTIONS) as model:
        yield model


@pytest.fixture(autouse=True)
def emptied(later: LLM) -> None:
    """What a test loads is not there for the next."""
    later.flush_cache()


@pytest.fixture(scope="module")
def saved(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it saved; tests damage copies."""
    path = tmp_path_factory.mktemp("persist") / "cache"
    assert llm.save_cache(path) > 250
    return path


def turn(model: LLM, text: str, **more: Any) -> str:
    """The text with its continuation."""
    answer: str = model.generate(text, **GREEDY, **more)[0].outputs[0].text
    return text + answer


def identity_of(model: LLM, salt: str = "") -> persist.Identity:
    """What a cache must say to be this engine's."""
    runner: Any = model.engine.runner
    return cache_identity(model.engine, runner, salt)


def read(model: LLM, path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Everything in a saved cache, once checked."""
    engine = model.engine
    snapshot, contents = persist.load(path, identity_of(model), engine.layout, FLOAT32, engine.model.vocab_size)
    return {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot)}, contents


def held(model: LLM) -> tuple[int, ...]:
    """What the cache holds, and what is left of the arena."""
    stats, pool = model.cache_stats(), model.stats()
    return stats.full_pages, stats.local_pages, stats.windows, pool.free_slots, pool.cached_slots


def test_a_restart_keeps_hot_prefixes(llm: LLM, later: LLM, tmp_path: Path) -> None:
    """The next turn runs as few tokens as without a restart, and says what it says without a cache."""
    saved = llm.save_cache(tmp_path / "cache")
    assert later.load_cache(tmp_path / "cache") == saved > 250
    assert held(later) == held(llm)
    prompts = [STORY, *(STORY + end + " he" for end in ENDS), STORY[:100] + "!", "Nobody knows this"]
    warm, again = (model.generate(prompts, **GREEDY) for model in (llm, later))
    with LLM("tiny", **OPTIONS, prefix_cache=False) as cold_model:
        cold = cold_model.generate(prompts, **GREEDY)
    for one, other, plain in zip(warm, again, cold, strict=True):
        assert other.prefix == one.prefix
        assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    assert later.cache_stats().cached_tokens > 250
    later.engine.check()


def test_what_is_loaded_is_bit_for_bit_what_was_saved(llm: LLM, later: LLM, saved: Path, tmp_path: Path) -> None:
    """Saved again by the engine that loaded it: the same pages, in some order."""
    later.load_cache(saved)
    later.save_cache(tmp_path / "cache")
    (one, first), (two, second) = read(llm, saved), read(llm, tmp_path / "cache")
    assert sum(one["length"]) == sum(two["length"])
    for lane, other in zip(first, second, strict=True):
        assert sorted(row.tobytes() for row in lane) == sorted(row.tobytes() for row in other)


def test_a_cache_can_be_saved_and_loaded_while_requests_run(llm: LLM, later: LLM, tmp_path: Path) -> None:
    """Between any two steps; the requests under way do not notice, nor do those that come later."""
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


def test_what_is_there_stays_and_the_rest_is_added(llm: LLM, later: LLM, saved: Path) -> None:
    """Loading into a cache that is in use; twice is once."""
    turn(later, STORY[:150] + " But then")
    mine = later.generate(STORY[:150] + " But then", **GREEDY)[0]
    added = later.load_cache(saved)
    assert 0 < added < llm.save_cache(saved.parent / "again")
    assert later.load_cache(saved) == 0
    again = later.generate(STORY[:150] + " But then", **GREEDY)[0]
    assert again.outputs[0].token_ids == mine.outputs[0].token_ids
    assert again.prefix == mine.prefix
    later.engine.check()


def test_salts_stay_apart(later: LLM, tmp_path: Path) -> None:
    """Each salt has a cache of its own; the salt itself is not in it."""
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
    """Of a salt that nobody has used."""
    assert later.save_cache(tmp_path / "cache", cache_salt="nobody") == 0
    assert later.load_cache(tmp_path / "cache", cache_salt="nobody") == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 8}, "page_size"),
        ({"load_format": "dummy"}, "weights"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_a_cache_of_another_engine_is_refused_by_name(
    saved: Path, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    """The first difference is named with both values, and the engine goes on as it was; its own it takes back."""
    with LLM("tiny", **{**SMALL, **options}) as other:
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


def test_the_identity_tells_models_and_layouts_apart() -> None:
    """One changed number of the config, one changed weight, another layout: each shows in its own field."""
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


def test_without_prefix_cache_nothing_can_be_saved_or_loaded(saved: Path) -> None:
    """ConfigError names the option."""
    with LLM("tiny", **SMALL, prefix_cache=False) as model:
        for call in (model.save_cache, model.load_cache):
            with pytest.raises(jswa.ConfigError) as caught:
                call(saved)
            assert caught.value.field == "prefix_cache"


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Damage: a manifest that says something else, with a checksum that is right."""

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
        (rewritten(lambda m: m["identity"].update(version="2")), "version of the cache is '2', this engine's is '1'"),
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
        (rewritten(lambda m: m["arrays"]["tokens"].update(sha256="0" * 64)), "'tokens' is torn"),
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
    """CacheFileError with the path; nothing is half-loaded."""
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
    """Half of a file, none of it, and a flipped bit here and there."""
    yield content[: len(content) // 2]
    yield b""
    for at in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_whatever_file_is_torn_nothing_is_loaded(saved: Path, later: LLM, tmp_path: Path) -> None:
    """Each file in turn is deleted, cut short and changed; the engine stays as it was, and works."""
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


def test_what_orbax_raises_is_a_cache_file_error(saved: Path, later: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache whose checksums are right and whose arrays cannot be read."""

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("NOT_FOUND: a chunk\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.Checkpointer.restore", fail)
        with pytest.raises(jswa.CacheFileError, match=r"cache: the cache is torn: ValueError: NOT_FOUND: a chunk$"):
            later.load_cache(saved)
    assert later.load_cache(saved) > 250


def test_a_cache_is_replaced_only_by_a_whole_one(
    llm: LLM, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving over a cache works; where saving fails, at any point, the old one is there, and nothing lies beside."""
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


def test_nothing_but_a_cache_is_overwritten(llm: LLM, saved: Path, tmp_path: Path) -> None:
    """Folders with anything else, files, and caches to which something was added; an empty folder will do."""
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
    assert os.stat(empty).st_mode & 0o077 == 0, "others can read it"
    for bad in ("\0", file / "below"):
        with pytest.raises(jswa.CacheFileError):
            llm.save_cache(bad)
        with pytest.raises(jswa.CacheFileError):
            llm.load_cache(bad)


def test_saved_pages_hold_nothing_but_the_text(llm: LLM, tmp_path: Path) -> None:
    """What follows a text in its last page may be somebody else's."""
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


def test_a_cache_that_cannot_be_written_to_the_device_is_given_up(
    saved: Path, later: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page stays in the tree that was not filled."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(later.engine.runner, "write_slots", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            later.load_cache(saved)
    assert later.cache_stats().full_pages == 0
    assert later.load_cache(saved) > 250
    assert jax.tree.leaves(later.engine.runner.state)  # type: ignore[attr-defined]
