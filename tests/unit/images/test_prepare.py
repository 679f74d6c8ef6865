"""Pictures of images (jswa/images/prepare.py), compared with transformers."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL.Image import Resampling

from jswa.images.decode import LIMITS
from jswa.images.picture import Geometry
from jswa.images.prepare import fitted, prepare
from tests.parity.patches.load import SHAPES, expected, sampled
from tests.support.attacks.images import image_of

EXPECTED = expected()
GEOMETRIES = st.builds(
    Geometry, st.sampled_from([14, 16]), st.integers(1, 4), st.sampled_from([70, 140, 280, 560, 1_120])
)
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 4_096), st.integers(1, LIMITS.most_side))


@pytest.mark.parametrize("name", SHAPES)
def test_a_picture_is_that_of_transformers(name: str) -> None:
    """Every pixel, position and the number of tokens."""
    drawn, theirs = SHAPES[name], EXPECTED[name]
    found = prepare(image_of(drawn.width, drawn.height), Geometry(most_tokens=drawn.most_tokens))
    assert found.tokens == theirs.tokens
    assert found.positions.tolist() == [[x, y] for y in range(theirs.rows) for x in range(theirs.columns)]
    assert found.positions.dtype == np.int32
    assert np.array_equal(sampled(found.patches), theirs.samples)
    assert hashlib.sha256(found.patches.tobytes()).digest() == theirs.sha256


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), GEOMETRIES.filter(lambda one: one.most_tokens <= 280))
def test_patches_put_in_their_places_are_the_resized_image(width: int, height: int, geometry: Geometry) -> None:
    image, side = image_of(width, height), geometry.patch
    found = prepare(image, geometry)
    columns, rows = (found.positions.max(0) + 1).tolist()
    whole = np.zeros((rows * side, columns * side, 3), np.uint8)
    for patch, (x, y) in zip(found.patches, found.positions * side, strict=True):
        whole[y : y + side, x : x + side] = patch.reshape(side, side, 3)
    assert np.array_equal(whole, np.asarray(image.resize((columns * side, rows * side), Resampling.BICUBIC)))


@given(SIDES, SIDES, GEOMETRIES)
def test_an_image_has_as_many_tokens_as_its_shape_allows(width: int, height: int, geometry: Geometry) -> None:
    """No shape is refused, and turning an image turns its patches."""
    columns, rows = fitted(width, height, geometry)
    assert (columns % geometry.pooling, rows % geometry.pooling) == (0, 0)
    wide, high = columns // geometry.pooling, rows // geometry.pooling
    assert 1 <= wide * high <= geometry.most_tokens
    assert fitted(height, width, geometry) == (rows, columns)
    if min(wide, high) > 1:
        assert math.isclose(wide + 0.5, math.sqrt(geometry.most_tokens * width / height), abs_tol=0.5 + 1e-9)
        assert math.isclose(high + 0.5, math.sqrt(geometry.most_tokens * height / width), abs_tol=0.5 + 1e-9)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((279, 1), (279, 1)), ((280, 1), (280, 1)), ((281, 1), (280, 1)), ((40_000, 1), (280, 1)), ((70, 1), (140, 2))],
)
def test_thin_images_have_a_row_of_tokens(size: tuple[int, int], tokens: tuple[int, int]) -> None:
    assert fitted(*size, Geometry()) == (3 * tokens[0], 3 * tokens[1])
