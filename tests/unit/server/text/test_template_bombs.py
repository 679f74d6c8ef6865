"""Templates that compile at once and explode while they are rendered cost their own process, and nobody else's time."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jswa.text.chat_template import ChatTemplate
from server.core.fairness import weights_of
from server.http.errors import ApiError
from server.killable.worker import MEMORY
from server.text.templates import Renderer
from tests.support.nights import sample

SECONDS = 1.0
LATE, LONG = r"took more than 1 s", r"the prompt has \d+ characters, at most \d+ are allowed"
DEEP, FULL = "RecursionError", "MemoryError"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}TEXT{% endfor %}{% endfor %}"
NEST = "{% set ns = namespace(v=WITH) %}{% for i in range(TIMES) %}{% set ns.v = NEXT %}{% endfor %}"


def nest(start: str, times: int, then: str, end: str) -> str:
    """Return a template that changes a value a number of times, and then writes something of it."""
    text = NEST.replace("WITH", start).replace("TIMES", str(times)).replace("NEXT", then)
    return text + "{{ " + end + " }}"


# The first of five runs with each change. What takes long here may fit on a faster machine: then another limit ends it.
BOMBS: dict[str, tuple[str, str]] = {
    "loops": (ENDLESS.replace("TEXT", ""), LATE),
    "more memory than there is": ("{{ messages[0].content * 3000000000 }}", FULL),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", DEEP),
    "percent": ("{{ '%1000000000d' % 1 }}", f"{LATE}|{LONG}"),
    "JSON of a tree": (nest("[1]", 40, "[ns.v, ns.v]", "ns.v|tojson"), LATE),
    "loops with text": (ENDLESS.replace("TEXT", "x"), LATE),
    "two calls in each": (
        "{% macro f(x) %}{% if x %}{{ f(x-1) }}{{ f(x-1) }}{% else %}a{% endif %}{% endmacro %}{{ f(60) }}",
        LATE,
    ),
    "calls of callers": (
        "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}"
        "{{ g() }}",
        DEEP,
    ),
    "recursive loop": ("{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}", DEEP),
    "doubled": (nest("messages[0].content", 60, "ns.v ~ ns.v", "ns.v|length"), f"{LATE}|{FULL}"),
    "replaced": (nest("'a' * 10", 9, "ns.v.replace('a', 'a' * 10)", "ns.v"), f"{LATE}|{FULL}|{LONG}"),
    "joined": ("{{ (range(99999)|list * 1000)|join(messages[0].content * 1000) }}", f"{LATE}|{FULL}"),
    "sorted": ("{{ (range(99999)|map('string')|list * 300)|sort(reverse=true)|length }}", LATE),
    "unique": ("{{ (range(99999)|list * 300)|unique|list|length }}", LATE),
    "grouped": ("{{ ([{'a': 1}, {'a': 2}] * 9999999)|groupby('a')|length }}", f"{LATE}|{FULL}"),
    "range": ("{{ range(10**12)|list }}", "OverflowError"),
    "percent with a star": ("{{ '%*d'|format(2000000000, 1) }}", f"{LATE}|{FULL}"),
    "precision": ("{{ '%.1000000000f' % 1.5 }}", FULL),
    "format in format": ("{{ '{:{}}'.format(1, 2000000000) }}", f"{LATE}|{FULL}"),
    "batch": ("{{ [1]|batch(2000000000, 'x')|list|length }}", FULL),
    "slice": ("{{ [1]|slice(2000000000, 'x')|list|length }}", LATE),
    "zfill": ("{{ '1'.zfill(2000000000) }}", f"{LATE}|{FULL}"),
    "tabs": (r"{{ '\t'.expandtabs(2000000000) }}", f"{LATE}|{FULL}"),
    "indent": (r"{{ ('a\n' * 1000)|indent(10000000) }}", f"{LATE}|{FULL}"),
    "JSON of a wide list": ("{{ (range(99999)|list * 1000)|tojson }}", f"{LATE}|{FULL}"),
    "JSON of a deep list": (nest("[]", 9999, "[ns.v]", "ns.v|tojson"), f"{LATE}|{DEEP}"),
    "text of a deep list": (nest("[]", 9999, "[ns.v]", "ns.v"), f"{LATE}|{DEEP}"),
    "deep lists compared": (nest("[[], []]", 9999, "[[ns.v[0]], [ns.v[1]]]", "ns.v[0] == ns.v[1]"), f"{LATE}|{DEEP}"),
    "chain of filters": (nest("[1]", 9999, "ns.v|map('string')", "ns.v|list"), f"{LATE}|{DEEP}"),
    "power": ("{{ 10 ** 999999999 % 7 }}", LATE),
    "squares": (nest("3", 99, "ns.v * ns.v", "ns.v"), LATE),
    "digits": ("{{ (10 ** 99999)|string|length }}", "ValueError"),
    "tags": ("{{ ('<!--' * 99999999)|striptags }}", f"{LATE}|{LONG}|{FULL}"),
    "wrapped": ("{{ ('a' * 9999999)|wordwrap(1) }}", f"{LATE}|{LONG}"),
    "titles": ("{{ ('a-' * 99999999)|title }}", f"{LATE}|{LONG}"),
    "lipsum": ("{{ lipsum(n=99999, max=99999) }}", LATE),
    "sums of lists": ("{{ ([range(9999)|list] * 99999)|sum(start=[])|length }}", f"{LATE}|{FULL}"),
    "long error": ("{{ raise_exception('a' * 900000000) }}", f"{LATE}|{FULL}"),
    "long name": ("{{ messages['a' * 100000000].x }}", f"{LATE}|has no attribute 'a+"),
    "half of a pair": (r"{{ raise_exception('\ud800') }}", "TemplateError"),
}


def peak_of(pid: int) -> int:
    """Return the most bytes that a process has occupied, or 0 if it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


class Rendering:
    """A renderer of two keys, on an event loop that runs while it is asked. `peak` is the most that a process took."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
        self.renderer = Renderer(template, SECONDS, weights_of(("A", "B"), ()))
        self.runner.run(self.renderer.start())
        self.peak = 0

    async def render(self, key: str, source: str | None = None) -> str:
        """Return what a template writes of the text "b", or the error."""
        messages = [{"role": "user", "content": "b"}]
        variables = {} if source is None else {"chat_template": source}
        try:
            return await self.renderer.render(messages, variables, key)
        except ApiError as error:
            return f"{error.status} {error}"

    async def watch(self) -> None:
        """Note how much memory the processes have had at most, until it is cancelled."""
        while True:
            for pid in self.renderer.pool.pids:
                self.peak = max(self.peak, peak_of(pid))
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def rendering() -> Iterator[Rendering]:
    """Yield a renderer, and end its processes."""
    found = Rendering()
    yield found
    found.runner.run(found.renderer.close())
    found.runner.close()


@pytest.mark.parametrize("name", sample(list(BOMBS), 8))
def test_a_bomb_costs_its_own_process(rendering: Rendering, name: str) -> None:
    """It ends in a 400 that says why; another key's chat is rendered meanwhile, and the key's own next one."""
    source, reason = BOMBS[name]

    async def explode() -> tuple[str, str, str]:
        watching = asyncio.ensure_future(rendering.watch())
        bomb = asyncio.ensure_future(rendering.render("A", source))
        other = await rendering.render("B")
        answer = await bomb
        watching.cancel()
        return answer, other, await rendering.render("A")

    answer, other, later = rendering.runner.run(explode())
    assert re.search(f"^400 messages: .*({reason})", answer), answer
    assert len(answer) < 1200
    assert (other, later) == ("b", "b")
    assert rendering.peak < MEMORY


def test_another_key_does_not_wait_for_bombs(rendering: Rendering) -> None:
    """One key has more of them than there are processes."""

    async def explode() -> int:
        bombs = [asyncio.ensure_future(rendering.render("A", BOMBS["loops"][0])) for _ in range(3)]
        await asyncio.sleep(0)
        assert await rendering.render("B") == "b"
        waiting = sum(not bomb.done() for bomb in bombs)
        assert all(re.search(LATE, answer) for answer in await asyncio.gather(*bombs))
        return waiting

    assert rendering.runner.run(explode()) == 3
