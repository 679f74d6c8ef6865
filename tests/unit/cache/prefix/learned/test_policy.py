"""What the learned policy sees of requests (jswa/cache/prefix/learned/policy.py), through the cache manager."""

import numpy as np
import pytest
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.edges import PROMPT_END, TEXT_END
from jswa.cache.prefix.learned.ageing import LEFT
from jswa.cache.prefix.learned.places import Places
from jswa.cache.prefix.learned.policy import Learned
from tools.cases.geometry import model_of

LAYOUT = KVLayout.of(model_of("gpt-oss-20b"), 64)


def run(manager: CacheManager, text: Int[np.ndarray, " T"], answer: int = 40) -> int:
    """Run a prompt to the end of its answer, which is drawn from its length; return where it started."""
    match = manager.match("", text, len(text) - 1)
    lease = manager.open_at(match, length=len(text))
    assert lease is not None
    assert manager.grow(lease, len(text) + answer)
    manager.slide(lease, len(text))
    manager.publish(lease, text, len(text))
    manager.slide(lease, len(text) + answer)
    manager.close(lease, np.concatenate([text, answer_to(text, answer)]), prompt=len(text))
    manager.drain_moves()
    manager.check(())
    return match.resume.start


def answer_to(text: Int[np.ndarray, " T"], length: int = 40) -> Int[np.ndarray, " n"]:
    """Return the answer to a prompt."""
    return np.arange(length, dtype=np.int32) + len(text)


def message(seed: int, length: int = 200) -> Int[np.ndarray, " n"]:
    """Return new tokens."""
    return np.random.default_rng(seed).integers(0, 100_000, length, dtype=np.int32)


def talk(manager: CacheManager, turns: int) -> Int[np.ndarray, " T"]:
    """Run a conversation, and return its text."""
    text = message(0, 0)
    for turn in range(turns):
        prompt = np.concatenate([text, message(turn)])
        run(manager, prompt)
        text = np.concatenate([prompt, answer_to(prompt)])
    return text


def test_places_are_those_of_so_many_turns_ago() -> None:
    manager = CacheManager(LAYOUT, 400, 40, 4)
    text = talk(manager, 3)
    (node,) = manager.match("", text, len(text)).path
    turn = len(text) // 3
    assert node.places == {
        turn - 40: PROMPT_END + 4,
        turn: TEXT_END + 4,
        2 * turn - 40: PROMPT_END + 2,
        2 * turn: TEXT_END + 2,
        3 * turn - 40: PROMPT_END,
        3 * turn: TEXT_END,
    }
    assert set(node.windows) == set(node.places), "a window was given up without need"


def test_what_a_conversation_held_beyond_is_left() -> None:
    manager = CacheManager(LAYOUT, 400, 40, 4)
    text = talk(manager, 3)
    turn = len(text) // 3
    assert run(manager, np.concatenate([text[: 2 * turn], message(9)])) == 2 * turn
    (above, left) = manager.match("", text, len(text)).path
    assert (above.end, left.kind) == (2 * turn, LEFT)
    assert all(child.kind != LEFT for child in above.children.values() if child is not left)
    # Who comes back to it takes it up again.
    run(manager, np.concatenate([text, message(10)]))
    assert left.kind != LEFT
    assert sum(child.kind == LEFT for child in above.children.values()) == 1


def test_a_prompt_that_many_share_leaves_nobody() -> None:
    manager = CacheManager(LAYOUT, 600, 40, 4)
    shared = message(0)
    for number in range(1, 9):
        run(manager, np.concatenate([shared, message(number)]))
    path = manager.match("", np.concatenate([shared, message(8)]), 300).path
    assert sum(child.kind == LEFT for child in path[0].children.values()) <= 3


def test_an_evicted_text_that_is_asked_for_is_a_use_at_its_age() -> None:
    manager = CacheManager(LAYOUT, 60, 40, 4)
    first = talk(manager, 1)
    for number in range(20, 40):
        run(manager, message(number, 600))
    match = manager.match("", np.concatenate([first, message(1)]), len(first))
    assert (match.reason, match.ghost is not None) == ("evicted", True)
    run(manager, np.concatenate([first, message(1)]))
    assert manager.match("", np.concatenate([message(77), first]), 10).ghost is None


def test_windows_that_nobody_asks_for_go_first() -> None:
    """Memory for the last windows of all conversations, but not for their prompts' too: each goes on from its end."""
    manager = CacheManager(LAYOUT, 330, 40, 4)
    texts = [message(1000 * number, 600) for number in range(8)]
    starts = []
    for turn in range(6):
        for number, text in enumerate(texts):
            prompt = np.concatenate([text, message(1000 * number + turn + 1, 100)])
            starts.append((run(manager, prompt), len(text)))
            texts[number] = np.concatenate([prompt, answer_to(prompt)])
    assert all(start == length for start, length in starts[8:])


def test_a_window_behind_another_is_worth_the_tokens_between_them() -> None:
    """A row that matches it would start at the one before; both hold the same pages."""
    losses = {}
    for answer in (1, 2, 40):
        manager = CacheManager(LAYOUT, 400, 40, 4)
        text = message(0)
        run(manager, text, answer)
        (node,) = manager.match("", np.concatenate([text, answer_to(text, answer)]), len(text) + answer).path
        window, policy = node.windows[len(text) + answer], manager.prefix.policy
        assert isinstance(policy, Learned)
        shared = float((1.0 / manager.prefix.tree.uses[window.slabs]).sum())
        losses[answer] = policy.victims.value(window) * shared
    assert losses[2] == pytest.approx(2 * losses[1])
    assert losses[40] == pytest.approx(40 * losses[1])


def test_places_that_are_asked_for_later_are_kept_until_then() -> None:
    places = Places()
    for _ in range(200):
        places.show([TEXT_END, TEXT_END + 2, TEXT_END + 4, TEXT_END + 6, TEXT_END + 8, PROMPT_END])
        places.ask(TEXT_END)
    for _ in range(50):
        places.ask(TEXT_END + 4)
    places.learn()
    share = places.share
    assert share[TEXT_END] == pytest.approx(0.98, abs=0.02)
    assert share[TEXT_END + 4] == pytest.approx(0.25, abs=0.03)
    assert share[TEXT_END + 2] > 0.1 > 10 * share[TEXT_END + 6], "in a turn it will be one that is asked for"
    assert share[PROMPT_END] < 0.02


def test_places_that_nobody_asks_for_lose_their_share_with_every_text_that_ends() -> None:
    manager = CacheManager(LAYOUT, 400, 40, 4)
    policy = manager.prefix.policy
    assert isinstance(policy, Learned)
    places = policy.places
    before = places.share
    talk(manager, 8)  # each turn goes on from the end of the text
    places.learn()
    assert places.share[PROMPT_END] < 0.8 * before[PROMPT_END]
    assert places.share[TEXT_END] > before[TEXT_END]


def test_a_turn_that_slides_past_a_page_in_one_step_keeps_the_window_before_it() -> None:
    """The row's copy of the partly filled page leaves its window before the row publishes it."""
    manager = CacheManager(LAYOUT, 400, 40, 4)
    text = talk(manager, 1)
    assert len(text) % LAYOUT.page_size
    prompt = np.concatenate([text, message(5, 600)])
    lease = manager.open_at(manager.match("", prompt, len(prompt) - 1), length=len(prompt))
    assert lease is not None
    assert manager.grow(lease, len(prompt))
    manager.slide(lease, len(prompt))
    assert manager.make_room(manager.pool.free_slots + 1)  # memory is short: pages that wait to be published go first
    manager.publish(lease, prompt, len(prompt))
    manager.close(lease, prompt, prompt=len(prompt))
    manager.check(())
    assert manager.match("", np.concatenate([text, message(6)]), len(text) + 9).resume.start == len(text)
