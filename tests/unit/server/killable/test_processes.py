"""A template costs its own process at most: limits hold before it is read, and whatever dies, nobody else waits."""

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jswa.errors import CheckpointError
from jswa.text.chat_template import ChatTemplate
from server.core.fairness import weights_of
from server.http.errors import ApiError
from server.killable import processes, worker
from server.killable.processes import Origin, Process
from server.killable.templates import packed
from server.killable.worker import MEMORY
from server.text.templates import Renderer
from tests.support.server.harness import until
from tests.support.server.killable import Looped, kill, state, stop

ROOT = Path(__file__).parents[4]
TEXT = "{{ messages[0].content }}"


class Alone:
    """A process that answers at its stdout, without a server."""

    def __init__(self, seconds: float) -> None:
        command = [sys.executable, "-P", worker.__file__, str(ROOT), "templates", str(seconds)]
        environ = {**os.environ, "USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        self._write(b"")

    def limits(self) -> str:
        """The limits, as the system shows them."""
        return Path(f"/proc/{self.process.pid}/limits").read_text()

    def peak(self) -> int:
        """The most bytes that the process has occupied."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def ask(self, question: bytes) -> bytes | None:
        """The bytes of the answer; None if the process has ended."""
        self._write(question)
        assert self.process.stdout is not None
        head = self.process.stdout.read(4)
        return self.process.stdout.read(struct.unpack("<I", head)[0]) if head else None

    def first(self, source: str) -> bytes | None:
        """Give it a template."""
        return self.ask(json.dumps({"sources": {"default": source}, "special_tokens": {}}).encode())

    def _write(self, question: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<I", len(question)) + question)
        self.process.stdin.flush()


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[Alone]:
    """Yield a process without a template, and end it. The parameter is the seconds of an answer."""
    found = Alone(getattr(request, "param", 11.0))
    yield found
    found.process.kill()
    found.process.communicate()


def question(content: object) -> bytes:
    """A conversation of one message."""
    return json.dumps({"messages": [{"role": "user", "content": content}], "variables": {}}).encode()


def test_limits_hold_before_a_byte_of_the_template_is_read(alone: Alone) -> None:
    """Also those of its files and dumps."""
    until(lambda: re.search(rf"Max address space +{MEMORY} +{MEMORY} ", alone.limits()) is not None)
    assert re.search(r"Max core file size +0 +0 ", alone.limits())
    assert re.search(r"Max file size +0 +0 ", alone.limits())
    assert alone.first(TEXT) is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_template_that_wants_much_memory_does_not_get_it(alone: Alone, first: bool) -> None:
    """A constant is computed when the template is compiled, and any other when the first message is rendered."""
    bombs = "{{ 'a' * 3500000000 }}{{ messages[0].content.center(3500000000) }}"
    source = bombs if first else "{% if messages[0].content %}" + bombs + "{% endif %}"
    assert alone.first(source) is not None
    answer = json.loads(alone.ask(question("b")) or b"{}")
    assert "MemoryError" in answer["refused"]
    assert alone.peak() < MEMORY


@pytest.mark.parametrize("kind", ["list", "object", "arguments"])
def test_no_question_ends_a_process(alone: Alone, kind: str) -> None:
    """Not even one that is no question."""
    assert alone.first(TEXT) is not None
    for depth in (10, 300, 990, 1_000, 1_100, 5_000, 200_000):
        nested = "[" * depth + "]" * depth if kind != "object" else '{"a":' * depth + "1" + "}" * depth
        variables, message = '{"x": ' + nested + "}", '{"role": "user", "content": "b"}'
        if kind == "arguments":
            calls = json.dumps([{"function": {"name": "f", "arguments": nested}}])
            variables, message = "{}", '{"role": "assistant", "content": "b", "tool_calls": ' + calls + "}"
        answer = alone.ask(f'{{"messages": [{message}], "variables": {variables}}}'.encode())
        assert answer is not None
        assert answer.startswith(b"Tb") or "refused" in json.loads(answer)
    for odd in (
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b"{",
        b"9" * 5_000,
        b'{"messages": 3, "variables": 4}',
        packed("x"),
    ):
        answer = alone.ask(odd)
        assert answer is not None
        assert {"failed", "refused"} & json.loads(answer).keys(), odd
    assert alone.ask(question("b")) == b"Tb"


@pytest.mark.parametrize("alone", [0.1], indirect=True)
def test_a_process_without_a_server_ends_when_its_time_is_over(alone: Alone) -> None:
    """A server that was killed cannot kill it."""
    endless = (
        "{% if messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert alone.first(endless + "{% endif %}") is not None
    assert alone.ask(question("b")) is None
    assert alone.process.wait() == -signal.SIGPROF


class Running:
    """A renderer on an event loop of its own."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.loop = Looped()
        self.call = self.loop.call

    def close(self) -> None:
        """End the processes and the loop."""
        self.call(self.renderer.close())
        self.loop.close()

    def chat(self, content: object) -> str:
        """Render a conversation of one message."""
        return str(self.call(self.renderer.render([{"role": "user", "content": content}], {})))

    def settle(self) -> list[int]:
        """Wait until there are three processes, and return their ids. A chat notices those that are lost."""
        assert self.chat("b") == "b"
        until(lambda: len(self.pids()) == 3)
        return self.pids()

    def pids(self) -> list[int]:
        """The ids of the processes that run; a process that was killed may still be listed."""
        return [pid for pid in self.renderer.pool.idle if state(pid) not in "ZX"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Yield a renderer for a server without keys."""
    found = Running(Renderer(ChatTemplate({"default": TEXT}, {}), 30.0, weights_of((), ())))
    found.call(found.renderer.start())
    yield found
    ids = found.settle()
    origin = int(state(ids[0], "PPid"))
    found.close()
    assert all(state(pid) in "ZX" for pid in [*ids, origin])


def test_messages_move_unless_the_rendering_is_exact(running: Running) -> None:
    """The template writes the first message only: the second one is joined to it."""
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert running.call(running.renderer.render(messages, {})) == "a\n\nb"
    assert running.call(running.renderer.render(messages, {}, exact=True)) == "a"


def test_there_is_a_spare_without_keys_too(running: Running) -> None:
    assert len(set(running.settle())) == 3


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["chat", "nested", "kill one", "kill two"]), max_size=6))
def test_a_chat_is_answered_whatever_has_been_killed(running: Running, steps: list[str]) -> None:
    """As long as one process is left, it answers; the others are soon replaced."""
    ids = running.settle()
    for step in steps:
        if step.startswith("kill"):
            ids = running.settle()
            kill(*ids[: 1 if step == "kill one" else 2])
            assert running.chat("b") == "b"
            assert ids[2] in running.renderer.pool.pids
        elif step == "nested":
            before = running.settle()
            nested: Any = []
            for _ in range(100_000):
                nested = [nested]
            with pytest.raises(ApiError, match="is nested too deeply") as caught:
                running.chat(nested)
            assert caught.value.status == 400
            assert running.settle() == before, "a process has ended"
            while nested:
                nested = nested.pop()
        else:
            assert running.chat("b") == "b"


def test_new_processes_come_without_an_import(running: Running) -> None:
    """All are killed again and again; the process that forks them stays."""
    origin = state(running.settle()[0], "PPid")
    for _ in range(10):
        kill(*running.pids())
        assert running.chat("b") == "b"
    assert {state(pid, "PPid") for pid in running.settle()} == {origin}


def test_the_process_that_forks_may_die_too(running: Running) -> None:
    """The others answer meanwhile, and a new one is started when a process is wanted."""
    ids = running.settle()
    origin = int(state(ids[0], "PPid"))
    kill(origin)
    assert running.chat("b") == "b"
    kill(*ids[:2])
    assert running.chat("b") == "b"
    assert running.settle()[0] == ids[2]
    kill(*running.settle())
    assert running.chat("b") == "b"


def test_a_template_that_ends_its_process_is_the_checkpoints_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not start with it."""
    monkeypatch.setattr("server.killable.pool.START_TIMEOUT", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    found = Running(Renderer(ChatTemplate({"default": endless}, {}), 1.0, weights_of((), ())))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="the chat template has ended the process"):
        found.call(found.renderer.start())
    assert time.monotonic() - start < 60
    assert found.renderer.pool.pids == []
    found.close()


@pytest.mark.parametrize("killed", range(3))
def test_a_chat_whose_process_is_killed_is_rendered_by_another_one(running: Running, killed: int) -> None:
    """The processes are stopped, so that one of them has the chat when one is killed; in some case it is the same."""
    ids = sorted(running.settle())
    stop(*ids)
    rendering = running.renderer.render([{"role": "user", "content": "b"}], {})
    answer = running.loop.begin(rendering)
    time.sleep(0.2)
    assert not answer.done()
    kill(ids.pop(killed))
    for pid in ids:
        os.kill(pid, signal.SIGCONT)
    assert answer.result(60) == "b"


def test_a_process_that_is_forked_too_late_is_ended(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes while a spare one is being forked: it and its connection belong to nobody."""
    running.settle()  # the renderer of the other tests forks no more
    forked: list[Process] = []

    def recorded(*arguments: Any) -> Process:
        forked.append(Process(*arguments))
        return forked[-1]

    async def closes_meanwhile() -> None:
        origin = Origin("templates", bytes, 1.0)
        late = asyncio.ensure_future(origin.fork())
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait((late,))
        await origin.close()

    monkeypatch.setattr(processes, "Process", recorded)
    asyncio.run(closes_meanwhile())
    (process,) = forked
    assert process.connection.fileno() == -1
    assert not process.alive
