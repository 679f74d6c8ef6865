"""The pictures of a request: their files are read or fetched, and prepared, several at a time."""

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from jswa.images.picture import Picture

from ..core.fairness import Key
from ..core.service import Service
from ..http.errors import invalid, no_body_memory, unsupported
from ..text.parts import ImagePart
from . import data_url

_BESIDE = 4  # images of a request that are prepared at the same time
TEXT_ONLY = "this model runs with text only; images are planned for Gemma 4 E2B and E4B first (docs/serving.md)"


class Album:
    """The pictures of one request, by the URLs of their files. Each URL is read once.

    It is a context: what the pictures occupy counts in the memory of bodies until it ends.
    """

    def __init__(self, service: Service, key: Key) -> None:
        self.service = service
        self.key = key
        self._pictures: dict[str, Picture] = {}
        self._claimed = 0  # bytes
        self._failed = False

    async def __aenter__(self) -> "Album":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._pictures.clear()
        self._release(self._claimed)

    async def pictures(self, parts: Sequence[ImagePart]) -> list[Picture]:
        """Return the pictures of parts, in their order. Raises ApiError, which names the part that is wrong."""
        if not parts:
            return []
        if self.service.engine.images is None:
            raise unsupported(f"{parts[0].part}.type", TEXT_ONLY)
        most = self.service.config.max_images
        if len(parts) > most:
            raise invalid(parts[most].part, f"is one image too many: a request may have {most} (--max-images)")
        for part in parts:
            self._check(part)
        new = {part.image_url: part for part in reversed(parts) if part.image_url not in self._pictures}
        beside = asyncio.Semaphore(_BESIDE)
        done = await asyncio.gather(*(self._add(one, beside) for one in reversed(new.values())), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error
        return [self._pictures[part.image_url] for part in parts]

    def _check(self, part: ImagePart) -> None:
        """Refuse an image that cannot be right, before any is read. Raises ApiError."""
        if data_url.is_data(part.image_url):
            data_url.size_of(part.image_url, part.field, self.service.config.max_image_size)
        else:
            self.service.fetcher.remote(part.image_url, part.field)

    async def _add(self, part: ImagePart, beside: asyncio.Semaphore) -> None:
        async with beside:
            if self._failed:
                return
            try:
                self._pictures[part.image_url] = await self._picture(part)
            except BaseException:
                self._failed = True
                raise

    async def _picture(self, part: ImagePart) -> Picture:
        assert self.service.preparer is not None
        url, field, most = part.image_url, part.field, self.service.config.max_image_size
        file = 0  # bytes that are claimed for the file

        async def took(size: int) -> None:
            nonlocal file
            await self._claim(size)
            file += size

        try:
            if data_url.is_data(url):
                await took(data_url.size_of(url, field, most))
                data = await data_url.read(url, field, partial(self.service.helpers.run, self.key))
            else:
                data = await self.service.fetcher.fetch(url, field, self.key, most, took)
            picture = await self.service.preparer.prepare(data, field, self.key)
        finally:
            self._release(file)
        await self._claim(picture.patches.nbytes + picture.positions.nbytes)
        return picture

    async def _claim(self, size: int) -> None:
        """Count bytes of this request. Raises ApiError (429) if there is no memory for them."""
        if not await self.service.engine.bodies.claim(self.key, size):
            raise no_body_memory()
        self._claimed += size

    def _release(self, size: int) -> None:
        self._claimed -= size
        self.service.engine.bodies.release(self.key, size)
