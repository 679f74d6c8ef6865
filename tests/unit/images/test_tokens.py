"""The tokens of images in prompts."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.errors import InvalidPrompt
from jswa.images.tokens import ImageTokens, image_ids, placed, placed_images, shown
from jswa.plan import ImageRows

TOKENS = ImageTokens(image=7, begin=8, end=9)
DIGESTS = st.binary(min_size=32, max_size=32)


class Counted(NamedTuple):
    """An image, as far as its tokens go."""

    tokens: int
    digest: bytes


IMAGES = st.lists(st.builds(Counted, st.integers(1, 12), DIGESTS), max_size=4)


@given(DIGESTS, DIGESTS, st.integers(1, 300))
def test_the_ids_of_an_image_are_its_own(one: bytes, other: bytes, count: int) -> None:
    """They never are those of text, nor the mark of tokens that the device has; a part of them is a beginning."""
    ids = image_ids(one, count)
    assert ids.dtype == np.int32
    assert ids.max() <= -2
    assert ids[: count // 2].tolist() == image_ids(one, count // 2).tolist()
    assert one == other or ids[:4].tolist() != image_ids(other, count)[:4].tolist() or count < 2


@given(st.lists(st.lists(st.integers(10, 20), max_size=3), min_size=5, max_size=5), IMAGES)
def test_images_are_placed_and_found_where_their_tokens_are(texts: list[list[int]], images: list[Counted]) -> None:
    ids: list[int] = []
    expected: list[int] = []
    for text, image in zip(texts, images, strict=False):
        ids += [*text, TOKENS.image]
        expected += [*text, TOKENS.begin, *[TOKENS.image] * image.tokens, TOKENS.end]
    ids.append(3)
    expected.append(3)
    prompt = placed(np.array(ids, np.int32), images, TOKENS)
    assert shown(prompt, TOKENS).tolist() == expected
    rows = [ImageRows(image.digest, np.zeros((image.tokens, 2), np.float32)) for image in images]
    found = placed_images(prompt, rows)
    for image, at in zip(images, found, strict=True):
        assert prompt[at.start : at.start + image.tokens].tolist() == image_ids(image.digest, image.tokens).tolist()
        assert prompt[at.start - 1] == TOKENS.begin
    assert [at.start for at in found] == sorted(at.start for at in found)


def test_a_prompt_has_a_token_for_each_image() -> None:
    ids, image = np.array([10, 7, 11], np.int32), Counted(2, b"a" * 32)
    with pytest.raises(InvalidPrompt, match=r"messages = 1: must have one token of an image for each of its 2 images"):
        placed(ids, [image, image], TOKENS, "messages")
    with pytest.raises(InvalidPrompt, match="each of its 0 images"):
        placed(ids, [], TOKENS)
    rows = ImageRows(image.digest, np.zeros((2, 2), np.float32))
    with pytest.raises(InvalidPrompt, match="image 1"):
        placed_images(placed(ids, [image], TOKENS), [rows, rows])
    with pytest.raises(InvalidPrompt, match="image 0"):
        placed_images(placed(ids, [image], TOKENS)[:-2], [ImageRows(b"b" * 32, rows.rows)])
