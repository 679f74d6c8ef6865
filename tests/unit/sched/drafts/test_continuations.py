"""What followed a text in a tree of texts (jswa/sched/drafts/continuations.py)."""

import numpy as np
import pytest
from jaxtyping import Int

from jswa.cache.prefix.edges import Node
from jswa.sched.drafts.continuations import BETWEEN, continuations

NONE = np.zeros(0, np.int32)
STEM, USED, OTHER = range(100, 110), range(200, 208), range(300, 305)  # two texts share STEM; USED was used last
BEHIND = 1 << 10


def below(parent: Node, tokens: range, last: int) -> Node:
    """Add an edge to a tree."""
    node = Node(parent.end, np.array(tokens, np.int32), NONE, NONE, parent, "", last)
    parent.children[tokens[0]] = node
    return node


def tree() -> list[Node]:
    """The edges of STEM, USED and OTHER."""
    stem = below(Node(0, NONE, NONE, NONE, None, "", 0), STEM, 2)
    return [stem, below(stem, USED, 2), below(stem, OTHER, 1)]


def continued(path: list[Node], text: list[int], at: int, most: int = 1 << 10, **options: int) -> tuple[list[int], int]:
    tokens: Int[np.ndarray, " T"] = np.array(text, np.int32)
    found, start = continuations((path, at), tokens, most, **{"before": 3, "behind": BEHIND, **options})
    return found.tolist(), start


@pytest.mark.parametrize("known", [1, 2, 3, 5, 7])
def test_a_text_begins_with_so_many_tokens_that_it_shares_across_edges(known: int) -> None:
    stem, used, _ = tree()
    text = [*STEM, *USED[:known]]
    assert continued([stem, used], text, len(text)) == ([*text[-3:], *USED[known:]], len(text) - 3)


def test_no_token_is_shared_before_the_first() -> None:
    stem, *_ = tree()
    found, start = continued([stem], [*STEM[:2]], 2)
    assert (found, start) == ([*STEM, *USED, BETWEEN, *STEM[-3:], *OTHER], 0)


def test_other_texts_follow_with_their_own_shared_tokens_up_to_the_most() -> None:
    stem, _, _ = tree()
    whole = [*STEM[-3:], *USED, BETWEEN, *STEM[-3:], *OTHER]
    for most in range(1, len(whole) + 2):
        assert continued([stem], [*STEM], len(STEM), most) == (whole[:most], len(STEM) - 3)


def test_what_is_far_behind_the_text_is_left_out() -> None:
    stem, used, _ = tree()
    text = [*STEM, *USED[:2], *range(400, 404)]  # it has gone on elsewhere, by four tokens
    assert continued([stem, used], text, 12) == ([*text[9:12], *USED[2:]], 9)
    assert continued([stem, used], text, 12, behind=2) == ([*USED[1:4], *USED[4:]], 11)


def test_nothing_follows_a_text_that_the_tree_has_not() -> None:
    assert continued([], [1, 2], 0) == ([], 0)
