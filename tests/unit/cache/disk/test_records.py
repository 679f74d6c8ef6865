"""Keys of the pages on the disk (jswa/cache/disk/records.py)."""

import itertools

import numpy as np
import pytest

from jswa.cache.disk.records import page_keys, tree_digest

TREES = [(identity, salt) for identity in ("a model", "another", "") for salt in ("", "a", "b", "ä", "\ud800")]


def test_no_page_has_the_key_of_another_salt_or_another_model() -> None:
    """A tenant's salt keeps its texts from others on the disk too."""
    tokens = np.arange(12, dtype=np.int32)
    roots = [tree_digest(*tree) for tree in TREES]
    assert {len(root) for root in roots} == {16}
    keys = [key for root in roots for key in (root, *page_keys(root, tokens, 4))]
    assert len(set(keys)) == len(keys) == 4 * len(TREES)


@pytest.mark.parametrize("changed", range(12))
def test_a_key_tells_the_page_and_all_text_before_it(changed: int) -> None:
    root, tokens = tree_digest("a model", ""), np.arange(12, dtype=np.int32)
    other = tokens.copy()
    other[changed] += 100
    pairs = itertools.zip_longest(page_keys(root, tokens, 4), page_keys(root, other, 4))
    assert [a == b for a, b in pairs] == [page < changed // 4 for page in range(3)]
