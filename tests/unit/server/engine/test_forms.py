"""A form costs its client: what takes long is killed and refused, and other keys' forms are compiled meanwhile."""

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jswa.grammar.asked import Asked, ChatAnswer
from jswa.grammar.compiler import Grammars
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from server.core.fairness import weights_of
from server.engine import forms
from server.engine.forms import Forms, Made
from server.http.errors import ApiError
from server.killable.forms import packed
from server.killable.pool import Pool
from tests.support.server.harness import until
from tests.support.server.killable import Looped, kill, origin, state, stop

ROOT = Path(__file__).parents[4]
KEYS = ("a", "b")
_numbers = itertools.count()


def question(**spec: Any) -> bytes:
    """The form of a text, packed."""
    return packed(Asked(StructuredOutputsParams(**spec)))


def fresh() -> bytes:
    """A small form that nobody has asked for."""
    return question(json={"type": "object", "properties": {f"p{next(_numbers)}": {"type": "integer"}}})


class Running:
    """Forms on an event loop of their own, for two keys."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.load(ROOT / "jswa/assets/tiny")
        assert tokenizer is not None
        self.grammars = Grammars(tokenizer, tokenizer.vocab_size, (1,))
        self.loop = Looped()
        self.forms = self.loop.call(self._made())

    async def _made(self) -> Forms:
        found = Forms(weights_of(KEYS, ()))
        await found.start(self.grammars)
        return found

    def close(self) -> None:
        """End the processes and the loop."""
        self.loop.call(self.forms.close())
        self.loop.close()

    @property
    def pool(self) -> Pool:
        """The processes."""
        assert self.forms.pool is not None
        return self.forms.pool

    def ask(self, asked: bytes, key: str = "a") -> Future[Made]:
        """Have a form compiled; to cancel the future is to leave."""
        return self.loop.begin(self.forms.compile(self.grammars, asked, (), key))

    def made(self, asked: bytes, key: str = "a") -> Made:
        """Have a form compiled."""
        return self.ask(asked, key).result(60)

    def pids(self) -> list[int]:
        """The processes that run, without the one that forks them."""
        return [pid for pid in self.pool.idle if state(pid) not in "ZX"]

    def settle(self) -> list[int]:
        """Wait until there are three processes, and return them."""
        assert self.made(fresh()).refused is None
        until(lambda: len(self.pids()) == 3)
        return self.pids()

    def stuck(self, key: str = "a", count: int = 1) -> tuple[list[int], list[Future[Made]]]:
        """Return processes that work for a key on forms without an end, and the forms."""
        before = self.settle()
        stop(*before)
        asked = [self.ask(fresh(), key) for _ in range(count)]
        until(lambda: self.pool.lanes.busy + self.pool.lanes.waiting == count)
        return before, asked


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Yield forms for two keys; none of their processes is left."""
    found = Running()
    yield found
    kill(*found.settle())
    ids = found.settle()
    forked_by = origin(ids[0])
    assert forked_by is not None
    found.close()
    assert all(state(pid) in "ZX" for pid in [*ids, forked_by])


def test_a_form_is_compiled_once_whoever_asks_for_it(running: Running) -> None:
    """In a process, and in this one; then it is found by its text, which is what requests have."""
    asked, compiled = fresh(), running.grammars.compiled
    made = running.made(asked)
    assert made.refused is None
    assert running.grammars.find(made.text) is not None
    assert running.made(asked, "b") == made
    again = running.grammars.compile(StructuredOutputsParams(grammar=made.text))
    assert again is running.grammars.find(made.text)
    assert running.grammars.compiled == compiled + 1


def test_a_refusal_has_its_place(running: Running) -> None:
    """In a schema, and among tools."""
    wrong = {"properties": {"a": {"not": {"minLength": 1}}}}
    made = running.made(question(json=wrong))
    assert made.refused is not None
    assert made.refused.startswith("at /properties/a: ")
    assert made.tool is None
    huge = {"type": "object", "properties": {"n": {"const": 10**30}}}
    assert "beyond 64 bits" in (running.made(question(json=huge)).refused or "")
    assert "lone surrogate" in (running.made(question(json={"const": "\ud800"})).refused or "")
    chat = ChatAnswer(None, [{"name": "f"}])
    assert running.made(packed(Asked(StructuredOutputsParams(json_object=True), chat))).refused is None


def test_what_takes_too_long_is_killed_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's time is limited by the process itself. A second request for the form starts nothing."""
    monkeypatch.setattr(forms, "SECONDS", 0.05)
    found = Running()
    try:
        names = [f"name {i}" for i in range(120)]
        alike = {"oneOf": [{"type": "object", "properties": {"a": {"enum": [n]}}, "required": ["a"]} for n in names]}
        heavy = question(json=alike)
        before = found.settle()
        made = found.made(heavy)
        assert made.refused is not None
        assert "s of the processor, or 2 GiB of memory" in made.refused
        assert found.forms.load().form_killed == 1
        until(lambda: len(found.pids()) == 3)
        assert set(before) - set(found.pids()), "no process was killed"
        after = found.settle()
        assert found.made(heavy, "b") == made
        assert found.settle() == after, "the form was tried again"
    finally:
        found.close()


def test_what_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    """A process that uses no time and gives no answer."""
    monkeypatch.setattr(forms, "TIMEOUT", 0.3)
    monkeypatch.setattr(forms, "SECONDS", 0.2)
    ids, [asked] = running.stuck()
    made = asked.result(60)
    assert made.refused is not None
    assert "is too costly" in made.refused
    until(lambda: sum(state(pid) in "ZX" for pid in ids) == 1)
    kill(*[pid for pid in ids if state(pid) not in "ZX"])


def test_the_forms_of_one_key_hold_up_no_other(running: Running) -> None:
    """However many it sends: one process is left for the other key, and none is lost when the first one leaves."""
    ids, asked = running.stuck("a", 20)
    assert running.pool.lanes.busy == 1
    ours = running.ask(fresh(), "b")
    until(lambda: running.pool.lanes.busy == 2)
    for future in asked:
        future.cancel()
    until(lambda: running.pool.lanes.waiting == 0)
    for pid in ids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert ours.result(60).refused is None
    until(lambda: running.pool.lanes.busy == running.pool.lanes.waiting == 0)


def test_a_process_is_killed_when_its_last_client_leaves(running: Running) -> None:
    """Not when the first of two does, who have asked for the same."""
    ids = running.settle()
    stop(*ids)
    asked = fresh()
    first, second = running.ask(asked), running.ask(asked)
    until(lambda: running.pool.lanes.busy == 1)
    first.cancel()
    with pytest.raises(CancelledError):
        first.result(10)
    assert running.pool.lanes.busy == 1
    assert all(state(pid) == "T" for pid in ids)
    second.cancel()
    until(lambda: sum(state(pid) in "ZX" for pid in ids) == 1)
    kill(*[pid for pid in ids if state(pid) not in "ZX"])
    assert running.made(asked).refused is None, "a form that was left is not costly"


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["form", "other", "leave", "kill one", "kill all", "kill origin", "same"]), max_size=8))
def test_a_form_is_compiled_whatever_happened_before(running: Running, steps: list[str]) -> None:
    """A form is refused only if its process was killed twice. No process is left beside the three, and none is lost."""
    kills, waiting = 0, list[tuple[int, Future[Made]]]()
    for step in steps:
        if step == "form":
            assert running.made(fresh()).refused is None
        elif step == "other":
            waiting.append((kills, running.ask(fresh(), "b")))
        elif step == "leave":
            running.ask(fresh()).cancel()
        elif step == "same":
            asked = fresh()
            waiting += [(kills, running.ask(asked, key)) for key in "aab"]
        elif step == "kill origin":
            kill(*{found for pid in running.settle() if (found := origin(pid)) is not None})
        else:
            ids = running.settle()[: 1 if step == "kill one" else 3]
            kill(*ids)
            kills += len(ids)
    for before, future in waiting:
        assert future.result(60).refused is None or kills > before + 1
    assert len(running.settle()) == 3
    until(lambda: running.pool.lanes.busy == running.pool.lanes.waiting == 0)


def test_a_form_is_not_at_fault_where_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the server's, and the form is tried when processes start again."""
    found, asked = Running(), fresh()
    try:
        ids = found.settle()
        forked_by = origin(ids[0])
        assert forked_by is not None
        with monkeypatch.context() as patched:
            patched.setattr("server.killable.processes._SCRIPT", ROOT / "no such file")
            kill(forked_by, *ids)
            with pytest.raises(ApiError, match="no process that tries forms could be started") as caught:
                found.made(asked)
            assert caught.value.status == 500
        assert found.made(asked).refused is None
    finally:
        found.close()


def test_a_fault_of_the_process_is_no_fault_of_the_form(running: Running) -> None:
    """The error tells what it was, and the next form is compiled."""
    killed = running.forms.load().form_killed
    with pytest.raises(RuntimeError, match="a form could not be tried: ValidationError"):
        running.made(b"[]")
    assert running.forms.load().form_killed == killed
    assert running.made(fresh()).refused is None
