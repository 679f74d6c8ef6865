"""Texts of earlier weights, kept as token ids (jswa/sched/drafts/earlier.py)."""

import random
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pytest

from jswa.cache.keys import root_key, root_of, tree_key
from jswa.cache.prefix.edges import Node
from jswa.cache.prefix.radix import common_prefix
from jswa.config import Limits
from jswa.plan import RowText, StepEvents
from jswa.running.turnover import Turnover
from jswa.sched.drafts.continuations import BETWEEN
from jswa.sched.drafts.earlier import EarlierTexts
from jswa.speculation import Speculation
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

Text = tuple[int, ...]
EDGE = 128  # tokens that an edge counts as beside its own


def nodes_of(texts: list[Text], last: int = 0) -> list[Node]:
    """The edges of a tree of texts, parents first, each of one token."""
    none = np.zeros(0, np.int32)
    found = [Node(0, none, none, none, None, "", last)]
    for text in texts:
        node = found[0]
        for at, token in enumerate(text):
            below = node.children.get(token)
            if below is None:
                below = node.children[token] = Node(at, np.array([token], np.int32), none, none, node, "", last)
                found.append(below)
            node = below
    return found


def agreeing(earlier: EarlierTexts, salt: str, text: Text) -> int:
    """How many tokens of a text are found."""
    path, at = earlier.walk(salt, np.array(text, np.int32))
    found = [token for edge in path for token in edge.tokens.tolist()]
    assert tuple(found[:at]) == text[:at]
    return at


@pytest.mark.parametrize("most", [1 << 20, 700])
def test_what_was_added_under_a_salt_is_found_under_it_alone(most: int) -> None:
    """Whatever was added in whatever order; with little room the last text is there, and nothing that never was."""
    for seed in range(60):
        chance, earlier, known = random.Random(seed), EarlierTexts(most), dict[str, list[Text]]()
        for turn in range(6):
            salt = chance.choice("ab")
            texts = [tuple(chance.choices(range(3), k=chance.randint(1, 9))) for _ in range(chance.randint(0, 4))]
            earlier.add(salt, iter(nodes_of(texts, turn)))
            earlier.check()
            known.setdefault(salt, []).extend(texts)
            for salt in "ab":
                for text in (tuple(chance.choices(range(3), k=10)), *known.get(salt, ())[-2:]):
                    arrays = [np.array(one) for one in (text, *known.get(salt, ()))]
                    longest = max((common_prefix(arrays[0], other) for other in arrays[1:]), default=0)
                    found = agreeing(earlier, salt, text)
                    assert found == longest if most > 700 else found <= longest
        assert earlier.tokens <= most
        earlier.clear()
        earlier.check()


def test_the_texts_used_longest_ago_go_first() -> None:
    texts = [(1, 2, 3), (1, 2, 4), (5, 6)]
    earlier = EarlierTexts(4 * EDGE + 20)  # (1, 2), (3), (4), (5, 6)
    for last, text in enumerate(texts):
        earlier.add("", iter(nodes_of([text], last)))
    assert [agreeing(earlier, "", text) for text in texts] == [3, 3, 2]
    earlier.add("", iter(nodes_of([texts[0]], 7)))
    earlier.add("other", iter(nodes_of([(9, 9)], 8)))
    assert [agreeing(earlier, "", text) for text in texts] == [3, 2, 2]
    assert agreeing(earlier, "other", (9, 9)) == 2
    earlier.check()


def test_an_edge_was_used_when_the_last_text_through_it_was() -> None:
    """An older use makes none older; a half of an edge has the use of the whole."""
    earlier = EarlierTexts(1 << 20)
    for last, text in ((3, (1, 2, 3)), (5, (1, 2, 4)), (9, (1, 2)), (4, (1, 2, 3)), (6, (1, 2))):
        earlier.add("", iter(nodes_of([text], last)))
    uses = [[edge.last for edge in earlier.walk("", np.array(text))[0]] for text in ((1, 2, 3), (1, 2, 4))]
    assert uses == [[9, 5], [9, 5]]


def test_a_scheduler_that_keeps_no_earlier_texts_forgets_none() -> None:
    """The engine says so whenever the cache is cleared, with and without drafts."""
    scheduler = Loop(
        make_layout(4, 6, num_full=1, num_local=2), Limits(40, 4, 16, 4, num_slabs=40), TextModel(99)
    ).scheduler
    assert scheduler.drafting.earlier is None
    scheduler.drafting.forget_texts()


@pytest.mark.parametrize("salt", ["", "a", "\0v1\0a", "\0", "v1\0"])
@pytest.mark.parametrize("digest", [None, "0af3"])
def test_a_tree_tells_whose_it_is_in_every_version(salt: str, digest: str | None) -> None:
    root = root_key(salt, digest)
    assert [root_of(tree_key(root, version)) for version in (0, 1, 12)] == [root] * 3


class Weights:
    """A runner whose weights change."""

    def replace_params(self, params: dict[str, Any]) -> None: ...

    def free_arena(self) -> None: ...

    def allocate_arena(self) -> None: ...

    def free_params(self) -> None: ...


class Asked(NamedTuple):
    """An engine without a device that looks drafts up in earlier texts, and what changes its weights."""

    loop: Loop
    turnover: Turnover

    def ask(self, tenant: str = "", length: int = 20) -> list[int]:
        """Run a request; return the texts in which its drafts are looked up at first."""
        seen: list[RowText] = []
        self.loop.before_launch = lambda plan: seen.extend(plan.texts)
        self.loop.scheduler.add(make_request(f"{tenant} {len(NAMES)}", PROMPT, length=length, tenant=tenant))
        NAMES.append(tenant)
        while self.loop.scheduler.has_work():
            self.loop.step()
            self.loop.scheduler.check()
        return [] if not seen or seen[0].reference is None else seen[0].reference.tolist()


NAMES: list[str] = []
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def asked() -> Asked:
    layout = make_layout(4, 6, num_full=1, num_local=2)
    drafts = Speculation("suffix", 3).of_length(40)
    loop = Loop(layout, Limits(40, 2, 16, 4, num_slabs=40, speculation=drafts), TextModel(1000))
    loop.scheduler.drafting.lengths = lambda rows, *, tokens, split, variant: ()
    return Asked(loop, Turnover(Weights(), loop.scheduler, StepEvents, Lock()))


def test_drafts_are_looked_up_in_texts_of_earlier_weights(asked: Asked) -> None:
    """However the weights change, asleep or awake, and under the same tenant alone; after a flush in none."""
    said = TextModel(1000).generate(PROMPT, (), 20)[0]
    text, turnover = [*PROMPT, *said], asked.turnover
    assert asked.ask() == []

    def known(found: list[int]) -> bool:
        """Whether what was said is among the texts, behind the end of the prompt. The last token has no KV."""
        return str([*PROMPT[-5:], *said[:-1]])[1:-1] in str(found)

    assert known(asked.ask())
    turnover.update({}, "continue")
    assert not known(asked.ask("another"))
    assert known(asked.ask())
    for mode in ("abort", "finish"):
        turnover.update({}, mode)
    assert known(asked.ask())
    turnover.sleep(2)
    turnover.update({}, "continue")
    turnover.wake()
    assert known(asked.ask())
    turnover.update({}, "continue")
    asked.loop.scheduler.drafting.forget_texts()
    assert asked.ask() == []
    assert len(text) == 20


def test_texts_of_the_weights_that_run_come_first(asked: Asked) -> None:
    asked.ask(length=12)
    asked.turnover.update({}, "continue")
    asked.ask(length=20)
    found = asked.ask()
    at = found.index(BETWEEN)
    assert len(found[:at]) > len(found[at + 1 :]) > 5
    assert found[:at][: len(found) - at - 1] == found[at + 1 :]
