"""The library is built at its first use, once, whole, and from these sources (pallas_kernels/cpu/first_use.py)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.cpu import first_use
from pallas_kernels.cpu.build import SOURCES, CannotBuild, digest_of_sources, interface

PACKAGE = SOURCES.parents[1]
PROVIDE = "from pallas_kernels.cpu.first_use import provide; print(provide(lambda line: print(line, flush=True)))"
BUILDING = "building the CPU kernels, once for this installation (about half a minute)\n"
# Writes its arguments into the file after -o, among them the digest of the sources; links by joining such files.
COMPILER = """#!/bin/sh
case " $* " in
  *" -shared "*)
    echo link >> {log}
    while [ ! -e {go} ]; do sleep 0.02; done
    shift 7; out=$1; shift; cat "$@" > "$out";;
  *) for last; do :; done; echo "$@" > "$last";;
esac
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has no library."""
    shutil.copytree(PACKAGE, tmp_path / "site" / PACKAGE.name, ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    return tmp_path / "site"


def start(site: Path, compiler: Path | str) -> "subprocess.Popen[str]":
    """A process that needs the library."""
    environ = {**os.environ, "PYTHONPATH": str(site), "CXX": str(compiler)}
    command = [sys.executable, "-c", PROVIDE]
    return subprocess.Popen(command, env=environ, cwd=site, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file for which compilers wait; after the test it is there in any case, so that none waits for ever."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()


def script(path: Path, text: str) -> Path:
    """A program of a few lines."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_of_several_processes_one_builds(installed: Path, go: Path, tmp_path: Path) -> None:
    """The other one waits and says so; later ones build nothing, unless the sources have changed."""
    log = tmp_path / "log"
    compiler = script(tmp_path / "cxx", COMPILER.format(log=log, go=go))
    library = installed / "pallas_kernels" / "cpu" / "jswa_cpu.so"
    first = start(installed, compiler)
    assert first.stdout is not None
    assert first.stdout.readline() == BUILDING
    second = start(installed, compiler)
    assert second.stdout is not None
    assert second.stdout.readline() == "another process builds the CPU kernels: waiting for it\n"
    assert not library.exists(), "it appears whole"
    go.touch()
    assert [each.communicate() for each in (first, second)] == [(f"{library}\n", "")] * 2
    assert start(installed, "no-such-compiler").communicate() == (f"{library}\n", "")
    assert log.read_text() == "link\n"
    with (library.parent / "src" / "types.h").open("a") as source:
        source.write("\n")
    assert start(installed, compiler).communicate() == (f"{BUILDING}{library}\n", "")
    assert log.read_text() == "link\n" * 2


@pytest.mark.parametrize(
    ("compiler", "why", "remedy"),
    [
        ("no-such-compiler", "there is no C++ compiler (no-such-compiler)", "install g++"),
        ('#!/bin/sh\necho "a note" >&2\necho "x: error: no" >&2\nexit 1\n', "the compiler fails: x: error: no", "CXX"),
        ("#!/bin/sh\nexit 3\n", "the compiler fails: it ends with status 3", "pallas_kernels.cpu.build"),
        ("no program", "the compiler fails: [Errno 8] Exec format error", "CXX"),
    ],
)  # fmt: skip
def test_a_build_that_fails_says_why_in_one_line(
    compiler: str, why: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing that could be taken for a library."""
    monkeypatch.setattr(first_use, "LIBRARY", tmp_path / "jswa_cpu.so")
    found = compiler if compiler == "no-such-compiler" else str(script(tmp_path / "cxx", compiler))
    monkeypatch.setenv("CXX", found)
    with pytest.raises(CannotBuild) as caught:
        first_use.provide(lambda _: None)
    assert why in caught.value.why
    assert "\n" not in caught.value.why
    assert remedy in caught.value.remedy
    assert first_use.find() is None
    assert not list(tmp_path.glob("*.so"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of libraries, where that of the package cannot be written; builds write a word."""
    monkeypatch.setattr(first_use, "LIBRARY", tmp_path / "no such folder" / "jswa_cpu.so")
    monkeypatch.setattr(first_use, "build", lambda target: target.write_text("built"))
    monkeypatch.setattr(first_use, "compiler", lambda: "g++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jswa" / "kernels"


def test_a_user_who_cannot_write_the_package_has_a_library_of_his_own(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name has the digest of its sources: a library of other ones is not found."""
    told: list[str] = []
    assert first_use.find() is None
    library = first_use.provide(told.append)
    assert library.parent == elsewhere
    assert str(digest_of_sources())[:32] in library.name
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    assert first_use.provide(told.append) == first_use.find() == library
    assert told == [BUILDING.rstrip()]
    monkeypatch.setattr(first_use, "digest_of_sources", lambda: "0" * 64)
    assert first_use.find() is None


def test_a_library_that_others_may_write_is_not_loaded(elsewhere: Path) -> None:
    library = first_use.provide(lambda _: None)
    elsewhere.chmod(0o777)
    assert first_use.find() is None
    library.unlink()
    with pytest.raises(CannotBuild, match="others may write") as caught:
        first_use.provide(lambda _: None)
    assert caught.value.remedy == f"chmod 700 {elsewhere}"


def test_a_library_of_other_sources_in_the_package_is_not_found(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of these sources comes before the user's own: a wheel has one, and so has the image."""
    own, library = first_use.provide(lambda _: None), tmp_path / "jswa_cpu.so"
    monkeypatch.setattr(first_use, "LIBRARY", library)
    library.write_text(f"… {'0' * 64} ffi {interface()} …")
    assert first_use.find() == own
    library.write_text(f"… {digest_of_sources()} ffi {interface()} …")
    assert first_use.find() == library
    monkeypatch.setattr(first_use, "digest_of_sources", lambda: None)
    library.write_text(f"… {'0' * 64} ffi {interface()} … sources that are not installed cannot be compared")
    assert first_use.find() == library


@pytest.mark.parametrize(("later", "found"), [(-1, True), (0, True), (1, False)])
def test_a_library_for_a_later_interface_of_xla_is_not_found(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, *, found: bool
) -> None:
    """XLA would refuse it. It was built before an older jaxlib took the place of jaxlib."""
    library = tmp_path / "jswa_cpu.so"
    monkeypatch.setattr(first_use, "LIBRARY", library)
    library.write_text(f"… {digest_of_sources()} ffi {interface() + later} …")
    assert (first_use.find() == library) is found


def test_jaxlib_names_its_interface() -> None:
    """In a header, whose form is not ours."""
    assert interface() >= 4


def test_folders_that_cannot_be_written_are_a_reason(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.parent.write_text("a file in the place of a folder")
    with pytest.raises(CannotBuild, match="Not a directory") as caught:
        first_use.provide(lambda _: None)
    assert "XDG_CACHE_HOME" in caught.value.remedy
