"""Saved prefix caches that are damaged, torn or another's: they are refused with the reason, and nothing is loaded."""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
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


def _unsigned(path: Path) -> None:
    """Damage the manifest alone."""
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": {}}))


def forged(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a damage: changed arrays, written by orbax, with right checksums."""

    def damage(path: Path) -> None:
        facts, arrays = json.loads((path / "manifest.json").read_text())["identity"], stored(path)
        change(arrays)
        shutil.rmtree(path)
        path.mkdir()
        persist.write_files(path, arrays, facts)

    return damage


def stored(path: Path) -> dict[str, Any]:
    """Return the arrays of a saved cache by name."""
    return dict(ocp.PyTreeCheckpointer().restore(path.resolve() / "arrays"))


def said(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a damage: a changed header, with right checksums."""

    def damage(arrays: dict[str, Any]) -> None:
        header = json.loads(arrays["header"].tobytes())
        change(header)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)

    return forged(damage)


def _replace_by(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / file).write_bytes(content)


def _header(content: bytes) -> Callable[[Path], None]:
    return forged(lambda arrays: arrays.update(header=np.frombuffer(content, np.uint8)))


def _text(at: int, value: Any) -> Callable[[Path], None]:
    """Return a damage: another value in the first text of the header."""
    return said(lambda header: header["texts"][0].__setitem__(at, value))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (rewritten(lambda m: m["identity"].update(version="2")), "version of the cache is '2', this engine's is '3'"),
        (rewritten(lambda m: m["identity"].pop("weights")), "weights of the cache is None"),
        (
            rewritten(lambda m: m["identity"].update(decode_context_parallel_size="2")),
            "decode_context_parallel_size of the cache is '2', this engine's is None",
        ),
        (rewritten(lambda m: m.update(identity=[1])), "version of the cache is None"),
        (_unsigned, "does not agree with its checksum"),
        (rewritten(lambda m: m.update(files=None)), "does not belong there"),
        (rewritten(lambda m: m["files"].update({"../../etc/passwd": "0"})), "passwd is missing"),
        (forged(lambda arrays: arrays.pop("header")), "not those"),
        (forged(lambda arrays: arrays.pop("lane_000")), "wrong size"),
        (forged(lambda arrays: arrays.update(evil=arrays["header"])), "not those"),
        (forged(lambda arrays: arrays.update(lane_000=arrays["lane_000"][1:])), "wrong size"),
        (forged(lambda arrays: arrays.update(lane_000=arrays["lane_000"][:, 1:])), "wrong size"),
        (forged(lambda arrays: arrays.update(lane_000=arrays["lane_000"].reshape(-1))), "wrong size"),
        (forged(lambda arrays: arrays.update(lane_000=arrays["lane_000"].view(np.int32))), "not those"),
        (_header(b"\xff\xfe"), "torn"),
        (_header(b"[1, 2]"), "torn"),
        (_header(b"{}"), "torn"),
        (_header(b"[" * 100_000), "torn: RecursionError"),
        (said(lambda header: header.pop("texts")), "torn: KeyError"),
        (said(lambda header: header.update(texts=7)), "torn: TypeError"),
        (said(lambda header: header.update(identity="00")), "of another engine"),
        (said(lambda header: header["pages"].pop()), "a page is missing|wrong size"),
        (said(lambda header: header["texts"].reverse()), "shares more than"),
        (_text(0, 7), "shares more than"),
        (_text(0, -1), "shares more than"),
        (_text(0, "0"), "torn: TypeError"),
        (said(lambda header: header.update(texts=[[0, "", 0, 0, []]])), "a text without tokens"),
        (said(lambda header: header.update(texts=[[0, base64.b64encode(bytes(8)).decode(), 0, 0, []]])), "is missing"),
        (_text(1, "AAAA"), "torn: ValueError"),
        (_text(2, -1), "a number out of range"),
        (_text(2, 0.5), "a number out of range"),
        (_text(4, [[1, True, 0]]), "torn: ValueError"),
        (_text(4, [[10**6, True, 0, 0]]), "a window beyond its text"),
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


def test_a_cache_that_is_larger_than_memory_is_not_read(
    saved: Path, later: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes that orbax has written are added up before any array is read."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda _: 100)
        patch.setattr("orbax.checkpoint.Checkpointer.restore", lambda *_, **__: pytest.fail("an array is read"))
        with pytest.raises(jswa.CacheFileError, match=r"the cache of \d+ bytes is larger than this machine's memory"):
            later.load_cache(saved)


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
        (Path, "write_text", fail),
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
