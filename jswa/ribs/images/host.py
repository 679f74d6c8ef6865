"""Images of prompts on the host: which steps read them, and the rows that such a step reads.

    prompt     t t t begin i i i i i i end t t     i: a soft token, whose id is negative
    launched   ────────────────▶│                  the step runs four tokens from here
    embedded                    r r r r            rows of the image, zeros for other tokens

A row runs its images as it runs any other part of its prompt: in chunks, also after the cached beginning of an image.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jswa.plan import PLAIN, PlacedImage, Request, StepResults, TokenEvent
from jswa.ribs.rib import NO_SECTION, Known, Landed, Needs, Rib, Section, Variant
from jswa.types import SamplingParams

NAME = "images"
EMBEDDED = "images"  # the variant


def needs_of(params: SamplingParams, images: bool) -> Needs:
    """Return what a prompt with images needs."""
    return Needs(frozenset({EMBEDDED})) if images else Needs()


def end_of(image: PlacedImage) -> int:
    """Return the position after an image's last soft token."""
    return image.start + len(image.rows)


class ImageRows:
    """Which rows have images in their prompt.

    Attributes:
        image_to: [max_rows], the position after the last image of a row that has some, 0 of any other.
        count: the number of rows that do.
    """

    def __init__(self, max_rows: int) -> None:
        self.image_to, self.count = np.zeros(max_rows, int), 0

    def begins(self, row: int, request: Request) -> None:
        """Enter a request that has some."""
        self.image_to[row] = end_of(request.images[-1])
        self.count += 1

    def leaves(self, row: int) -> None:
        """Clear the entries of a row."""
        self.image_to[row] = 0
        self.count -= 1

    def variant(self, launched: Int[np.ndarray, " max_rows"], row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant of a step of these rows; None: of any step."""
        if not self.count:
            return PLAIN
        images = launched < self.image_to
        return EMBEDDED if (images if row_ids is None else images[row_ids]).any() else PLAIN

    def section(self, tokens: int, known: Sequence[Known]) -> Section:
        """Return the rows of images in a step; none if it runs no prompt with images."""
        width = next((image.rows.shape[1] for row in known for image in row.request.images), 0)
        if not width:
            return NO_SECTION
        found = np.zeros((tokens, width), np.float32)
        begin = tokens - sum(row.runs for row in known)
        for row in known:
            for image in row.request.images:
                first, last = max(image.start, row.launched), min(end_of(image), row.launched + row.runs)
                if first < last:
                    here = begin - row.launched
                    found[here + first : here + last] = image.rows[first - image.start : last - image.start]
            begin += row.runs
        return Section(embedded=found)

    def applied(self, landed: Landed, results: StepResults | None, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events as they are: nothing comes back of images."""
        return events

    def check(self, used: Int[np.ndarray, " n"]) -> None:
        """Assert that rows which no request has are clear, and that the count is right."""
        has = np.flatnonzero(self.image_to)
        assert set(has.tolist()) <= set(used.tolist()), "an unused row id has images"
        assert self.count == len(has)


IMAGES = Rib(NAME, (NAME,), {EMBEDDED: Variant(forward=EMBEDDED, embeds=True, asked=True)}, needs_of, ImageRows)
