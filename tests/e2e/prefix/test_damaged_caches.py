"""Saved prefix caches that are damaged, torn or another's: they are refused with the reason, and nothing is loaded."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jswa
from jswa.llm import LLM
from jswa.storage import persist
from tests.support.prefix.saved import GREEDY, STORY, held, read

pytestmark = pytest.mark.usefixtures("emptied")


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
