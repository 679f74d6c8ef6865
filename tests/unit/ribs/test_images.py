"""Images of prompts on the host: in which variant a step runs, and which rows its tokens get."""

import numpy as np
import pytest

from jswa.errors import RequestError
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.plan import PLAIN, PlacedImage, Request
from jswa.ribs.images.host import ImageRows
from jswa.ribs.rib import NO_SECTION, Known
from jswa.ribs.table import needs_of
from jswa.sched.sequence import Sequence
from jswa.types import SamplingParams
from tests.support.builders import make_plan

ROWS, WIDTH = 4, 2
TEXT = Request("t", np.arange(9, dtype=np.int32), SamplingParams(), frozenset(), (0, 0), 100)


def rows_of(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.float32)[:, None] * np.ones((1, WIDTH), np.float32)


def request() -> Request:
    """A prompt of 12 tokens, with images of three tokens from position 2 and of four from position 6."""
    images = PlacedImage(2, rows_of(10, 3)), PlacedImage(6, rows_of(20, 4))
    return Request("i", np.arange(12, dtype=np.int32), SamplingParams(), frozenset(), (0, 0), 100, images=images)


def test_a_step_reads_images_until_the_last_has_run() -> None:
    rows, launched = ImageRows(ROWS), np.zeros(ROWS, int)
    assert rows.variant(launched) == PLAIN
    rows.begins(1, request())
    assert rows.variant(launched) == rows.variant(launched, np.array([0, 1])) == "images"
    assert rows.variant(launched, np.array([0, 2])) == PLAIN
    launched[1] = 9
    assert rows.variant(launched, np.array([1])) == "images"
    launched[1] = 10
    assert rows.variant(launched) == PLAIN
    rows.check(np.array([1]))
    with pytest.raises(AssertionError, match="unused row"):
        rows.check(np.array([2]))
    rows.leaves(1)
    rows.check(np.zeros(0, int))


def test_each_token_of_an_image_gets_its_row_in_whatever_chunks_a_prompt_runs() -> None:
    """Behind two tokens of other rows and three of a prompt without images, which get none."""
    rows, asked = ImageRows(ROWS), request()
    whole = np.zeros((12, WIDTH), np.float32)
    whole[2:5], whole[6:10] = rows_of(10, 3), rows_of(20, 4)
    for start in range(12):
        for count in range(1, 13 - start):
            known = [Known(TEXT, TEXT.prompt, 0, 3), Known(asked, asked.prompt, start, count)]
            numbers, found = rows.section(5 + count, known)
            assert not len(numbers)
            assert found is not None
            assert not found[:5].any()
            np.testing.assert_array_equal(found[5:], whole[start : start + count])
    assert rows.section(3, [Known(TEXT, TEXT.prompt, 0, 3)]) == NO_SECTION


def test_log_probabilities_of_a_prompt_with_images_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        needs_of(SamplingParams(prompt_logprobs=0), images=True)


def test_a_sequence_needs_images_if_its_prompt_has_some() -> None:
    variants = [Sequence(one, (0, 0), limit=50).needs.variants for one in (TEXT, request())]
    assert variants == [frozenset(), frozenset({"images"})]


@pytest.mark.parametrize(
    ("bucket", "counts", "places"),
    [
        (Bucket(8, 2, decode=False), [3, 2], [0, 1, 2, 3, 4]),
        (Bucket(2, 2, decode=True), [1, 1], [0, 1]),
        (Bucket(6, 2, decode=True, drafts=2), [1, 1], [0, 3]),  # each row has three places
    ],
    ids=str,
)
def test_rows_in_place_of_embeddings_are_packed_where_their_tokens_are(
    bucket: Bucket, counts: list[int], places: list[int]
) -> None:
    spec = PackSpec.of(bucket, page_size=4, max_rows=ROWS, width=WIDTH)
    plan = make_plan([0, 1], [0, 0], counts, embedded=rows_of(1, sum(counts)))
    expected = np.zeros((bucket.tokens, WIDTH), np.float32)
    expected[places] = rows_of(1, sum(counts))
    np.testing.assert_array_equal(unpack(pack(plan, spec), spec).embedded.view(np.float32), expected)
