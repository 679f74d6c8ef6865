"""Images of prompts, prepared in processes that are killed when it takes too long."""

import logging
import time
from functools import partial

from jswa.errors import InvalidImage
from jswa.images.decode import require_pillow
from jswa.images.picture import Geometry, Picture

from ..core.fairness import Key, Weights
from ..http.errors import ApiError
from ..killable.images import Refusal, packed, read
from ..killable.pool import EndedError, NotStartedError, Pool
from ..killable.worker import MEMORY

_log = logging.getLogger("jswa.server")
SECONDS = 10.0  # of the processor, to decode and resize an image
TIMEOUT = 30.0  # seconds, while other processes have the processor
_COSTLY = f"is too costly: it takes more than {SECONDS:g} s of the processor, or {MEMORY // 2**30} GiB of memory"


class Preparer:
    """The processes that prepare images for one model.

    `start` starts the first process, and `close` ends all.
    """

    def __init__(self, geometry: Geometry, weights: Weights) -> None:
        self._geometry = geometry
        self.pool = Pool("images", bytes, packed(geometry), SECONDS, weights)

    async def start(self) -> None:
        """Start a process, so that the first image does not wait for one.

        Raises ConfigError if Pillow is not installed, and NotStartedError.
        """
        require_pillow()
        await self.pool.start()

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()

    async def prepare(self, data: bytes, field: str, key: Key = None) -> Picture:
        """Return the picture of a file. Raises ApiError, which names `field`.

        If the process ends before its time is over, another one is asked, once: someone may have killed it.
        """
        for _ in range(2):
            begin = time.monotonic()
            try:
                async with self.pool.taken(key) as worker:
                    begin = time.monotonic()  # its turn has come
                    found = await worker.ask(lambda: data, partial(read, geometry=self._geometry), TIMEOUT)
            except NotStartedError as error:
                raise ApiError(500, "no process that prepares images could be started") from error
            except (TimeoutError, EndedError) as error:
                _log.warning("an image has ended the process that prepared it: %s", error or "it took too long")
                if time.monotonic() - begin > SECONDS:
                    break
            else:
                if isinstance(found, Refusal):
                    raise ApiError.of(InvalidImage(field, *found))
                return found
        raise ApiError.of(InvalidImage(field, f"{len(data)} bytes", _COSTLY))
