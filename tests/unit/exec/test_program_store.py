"""The store of compiled programs: what it gives back, and what it must not give back."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jswa.exec.compile import store as store_module
from jswa.exec.compile.store import ProgramStore, compiled, named, open_store, prune

ROOT = Path(__file__).parents[3]
SALT = time.time() % 1000  # each test adds to it, so that jax's own cache has never seen its program
ARGUMENTS = np.ones(8, np.float32), np.ones((), np.float32)


def traced(store: ProgramStore, what: str = "add", salt: float | None = None) -> tuple[Any, int]:
    """Return a program of the store, and how often it was traced for this. `salt` makes it unlike all others."""
    count, salt = 0, SALT if salt is None else salt

    def add(state: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return {"sum": state["sum"] + x * np.float32(salt)}, (x, None)

    arguments = {"sum": ARGUMENTS[0]}, ARGUMENTS[1]
    return compiled(store, what, jax.jit(add, donate_argnums=0), arguments), count


def opened(folder: Path, sources: str = "s") -> ProgramStore:
    return ProgramStore(folder, jax.devices()[:1], sources)


def run(program: Any) -> Any:
    """Return the sum that the program gives; its state is donated."""
    state = {"sum": jax.device_put(ARGUMENTS[0])}
    new, (_, nothing) = program(state, jax.device_put(ARGUMENTS[1]))
    assert nothing is None
    assert state["sum"].is_deleted()
    np.testing.assert_allclose(new["sum"], 1 + np.float32(SALT), rtol=1e-6)
    return new


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one program."""
    program, count = traced(opened(tmp_path))
    assert count == len(list(tmp_path.glob("*.program"))) == 1
    run(program)
    return tmp_path


@pytest.fixture(autouse=True)
def another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a program that jax's cache has never seen."""
    monkeypatch.setattr(sys.modules[__name__], "SALT", SALT + np.random.default_rng().uniform(1, 1000))


def test_a_program_is_loaded_without_being_traced(folder: Path) -> None:
    """It donates its state and uses as much memory as before."""
    fresh, _ = traced(opened(folder / "other"))
    program, count = traced(opened(folder))
    assert count == 0
    run(program)
    assert program.memory_analysis().alias_size_in_bytes == fresh.memory_analysis().alias_size_in_bytes > 0


def test_other_sources_trace_again_and_share_the_program(folder: Path) -> None:
    """If the sources have changed, but not what XLA compiles, the program is loaded after it was traced."""
    kept = {path: path.read_bytes() for path in folder.glob("*.program")}
    program, count = traced(opened(folder, "changed"))
    assert count == 1
    run(program)
    assert {path: path.read_bytes() for path in folder.glob("*.program")} == kept
    assert len(list(folder.glob("*.key"))) == 2
    assert traced(opened(folder, "changed"))[1] == traced(opened(folder))[1] == 0


def test_arguments_that_nothing_reads_are_part_of_a_program(folder: Path) -> None:
    """As page tables are not by copies of pages: engines whose tables have another width have their own programs."""
    salt = SALT
    for width in (8, 4, 8):
        arguments = ARGUMENTS[1], np.zeros(width, np.int32)
        program = compiled(opened(folder), "half", jax.jit(lambda x, table: x + np.float32(salt)), arguments)
        np.testing.assert_allclose(program(*map(jax.device_put, arguments)), 1 + np.float32(salt), rtol=1e-6)


def test_other_values_shapes_and_settings_are_other_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(opened(folder), what="another")[1] == 1
    function = jax.jit(lambda x: x * np.float32(SALT))
    count = len(list(folder.glob("*.program")))
    for shape, dtype in (((8,), np.float32), ((9,), np.float32), ((8,), np.int32)):
        with jax.numpy_dtype_promotion("standard"):
            compiled(opened(folder), "f", function, (np.ones(shape, dtype),))
        count += 1
        assert len(list(folder.glob("*.program"))) == count
    monkeypatch.setenv("XLA_ANOTHER", "1")
    assert traced(opened(folder))[1] == 1
    monkeypatch.delenv("XLA_ANOTHER")
    monkeypatch.setattr(store_module, "processor", lambda: "another processor")
    assert traced(opened(folder))[1] == 1


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    other = opened(path.parent / "other")
    compiled(other, "other", jax.jit(lambda x: x - np.float32(SALT)), ARGUMENTS[:1])
    (found,) = (path.parent / "other").glob(f"*{path.suffix}")
    path.write_bytes(found.read_bytes())


@pytest.mark.parametrize("suffix", [".program", ".key"])
@pytest.mark.parametrize("spoil", [torn, flipped, empty, foreign])
def test_a_spoiled_entry_is_replaced(
    folder: Path, spoil: Callable[[Path], None], suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log says so."""
    (path,) = folder.glob(f"*{suffix}")
    good = path.read_bytes()
    spoil(path)
    with caplog.at_level(logging.WARNING, "jswa"):
        program, count = traced(opened(folder))
    run(program)
    assert count == 1
    assert path.read_bytes() != b""
    if suffix == ".key":
        assert path.read_bytes() == good
    assert len([record for record in caplog.records if record.name == "jswa"]) == 1
    assert "torn or belongs to another" in caplog.text


def test_a_program_that_jaxlib_cannot_load_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its digest is right, as if another jaxlib had written it."""
    (path,) = folder.glob("*.program")
    path.write_bytes(sha256(path.name.encode() + b"\0no program").digest() + b"no program")
    with caplog.at_level(logging.WARNING, "jswa"):
        run(traced(opened(folder))[0])
    assert "cannot be loaded" in caplog.text


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = opened(tmp_path / "file" if kind == "a file" else tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING, "jswa"):
        run(traced(store)[0])
        run(traced(store)[0])
    assert caplog.text.count("are not kept") == 1


def test_threads_and_processes_may_write_at_once(tmp_path: Path) -> None:
    """Both programs run, and a third process loads one without tracing it."""
    code = "import sys; from pathlib import Path; from tests.unit.exec import test_program_store as t; "
    code += "t.SALT = float(sys.argv[2]); p, n = t.traced(t.opened(Path(sys.argv[1]))); t.run(p); print(n)"
    command = [sys.executable, "-c", code, str(tmp_path), str(SALT)]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    for process in both:
        assert process.communicate()[0].strip() in ("0", "1")  # one may find what the other has written
    third = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert third.stdout.strip() == "0"
    assert not list(tmp_path.glob("*.new"))
    with ThreadPoolExecutor() as pool:
        for program in pool.map(lambda _: traced(opened(tmp_path / "threads"))[0], range(8)):
            run(program)


def test_what_was_not_used_for_long_is_deleted(tmp_path: Path) -> None:
    """First what is too old, then the oldest of what is too much."""
    now = time.time()
    for age in range(5):
        path = tmp_path / str(age)
        path.write_bytes(b"x" * 10)
        os.utime(path, (now - 100 * age, now - 100 * age))
    prune(tmp_path, 1000, 350.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    prune(tmp_path, 25, 350.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    prune(tmp_path / "missing", 0, 0.0)


def test_sources_that_changed_after_their_import_use_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest would be that of code which does not run."""
    assert open_store(None, jax.devices()) is None
    assert open_store(tmp_path, jax.devices()) is not None
    monkeypatch.setattr(store_module, "IMPORTED", 1.0)
    assert open_store(tmp_path, jax.devices()) is None


def test_a_partial_function_is_named_with_its_arguments() -> None:
    assert named(prune) == "jswa.exec.compile.store.prune"
    assert named(partial(prune, most_bytes=3)) == "jswa.exec.compile.store.prune () {'most_bytes': 3}"


def test_a_figure_is_made_once_and_stays(tmp_path: Path) -> None:
    """Other sources, arguments or names have their own; a torn one is made anew."""
    made: list[int] = []

    def make() -> int:
        made.append(0)
        return 12_345

    for _ in range(2):
        assert opened(tmp_path).figure("scratch", ARGUMENTS, "", make) == 12_345
    assert len(made) == 1
    opened(tmp_path, "others").figure("scratch", ARGUMENTS, "", make)
    opened(tmp_path).figure("another", ARGUMENTS, "", make)
    opened(tmp_path).figure("scratch", ARGUMENTS[1:], "", make)
    assert len(made) == 4
    for path in tmp_path.glob("*.figure"):
        path.write_bytes(path.read_bytes()[:-1])
    assert opened(tmp_path).figure("scratch", ARGUMENTS, "", make) == 12_345
    assert len(made) == 5


def test_threads_trace_in_turns_of_which_each_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that runs steps beside them gets Python's lock soon; afterwards its turns are as long as before."""
    inside, most, intervals = 0, 0, set[float]()

    def double(x: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        intervals.add(round(sys.getswitchinterval(), 6))
        time.sleep(0.05)
        inside -= 1
        return 2 * x

    usual = sys.getswitchinterval()
    stores = [None, opened(tmp_path), None, opened(tmp_path)]

    def compile_one(number: int) -> None:
        size = np.ones(number + 1, np.float32)
        compiled(stores[number], f"double {number} {SALT}", jax.jit(double), (size,))

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(compile_one, range(len(stores))))
    assert (most, intervals) == (1, {2e-4})
    assert sys.getswitchinterval() == usual
