"""Admits requests: waits for missing programs, bounds the queue, validates, and puts them into the engine's inbox.

With front ends in processes of their own, this is in the engine's process.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from jswa.errors import JswaError
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.engine_thread import EngineThread
from jswa.frontend.requests import make_requests
from jswa.images.picture import Picture
from jswa.plan import ImageRows, Request, TokenEvent
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

from ..core.counts import Load
from ..core.fairness import Admission, Helpers, Key
from ..core.off_loop import gathered
from ..core.texts import Order
from ..http.errors import engine_errors

Ids = Int[np.ndarray, " P"]
Put = Callable[[TokenEvent | JswaError], None]


class Intake:
    """Queues requests in an engine, and counts each text as waiting until its first token or its end.

    Attributes:
        eyes: threads in which the model reads images.
    """

    def __init__(
        self, engine_thread: EngineThread, admission: Admission, tokenizer: Tokenizer | None, eyes: Helpers
    ) -> None:
        self.engine_thread = engine_thread
        self.admission = admission
        self.eyes = eyes
        self._tokenizer = tokenizer
        self._waiting: dict[str, tuple[Key, int]] = {}  # key and prompt length of the texts without a token

    async def submit(
        self,
        names: Sequence[str],
        prompts: Sequence[Ids],
        params: SamplingParams,
        order: Order,
        put: Put,
        tokens: Mapping[str, Callable[[int], object]] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> float:
        """Queue a request's texts, the first n for the first prompt; return the seconds it waited for programs.

        Raises ApiError; then nothing is queued.

        Args:
            names: the ids of the texts, which no other text has had.
            put, tokens: as `EngineThread.submit` has them.
            pictures: the images of the only prompt.
        """
        lengths = [len(prompt) for prompt in prompts for _ in range(params.n)]
        with engine_errors():
            compiling = await self.engine_thread.prepare(params, images=bool(pictures))
        self.admission.admit(order.key, len(lengths), sum(lengths))
        self._waiting |= {name: (order.key, length) for name, length in zip(names, lengths, strict=True)}

        def received(event: TokenEvent | JswaError) -> None:
            if isinstance(event, TokenEvent):
                if event.version is not None:
                    return  # answers do not say which weights their tokens come from
                self.begun(event.request_id)
            put(event)

        try:
            work = _size(prompts, params, len(lengths))
            with engine_errors():
                images = await self._see(pictures, order)
                await self._restore_form(params)
            with engine_errors():  # no variable holds the engine while this waits
                requests = await gathered(
                    build(self.engine_thread.engine, self._tokenizer, iter(names), prompts, params, order, images), work
                )
                self.engine_thread.submit(requests, received, tokens)
        except BaseException:
            for name in names:
                self.begun(name)
            raise
        return compiling

    async def _see(self, pictures: Sequence[Picture], order: Order) -> Sequence[ImageRows]:
        """Return what the model reads of pictures: in a thread, at which keys take turns. Raises JswaError."""
        if not pictures:
            return ()
        salt = order.options.cache_salt
        return await self.eyes.run(order.key, lambda: self.engine_thread.engine.see(pictures, salt))

    async def _restore_form(self, params: SamplingParams) -> None:
        """Compile a request's form once more if it was dropped while the request waited: never on the event loop."""
        form, grammars = params.structured_outputs, self.engine_thread.engine.grammars
        if form is not None and form.grammar is not None and grammars is not None and not grammars.find(form.grammar):
            await asyncio.to_thread(grammars.add, form.grammar)

    def load(self) -> Load:
        """Return how many requests wait for the model to read their images, and how many were refused there."""
        return Load(image_waiting=self.eyes.lanes.waiting, image_refused=self.eyes.lanes.refused)

    def begun(self, name: str) -> None:
        """Count a text as waiting no longer: it has its first token, or has ended."""
        key, length = self._waiting.pop(name, (None, -1))
        if length >= 0:
            self.admission.release(key, 1, length)

    def abort(self, names: Iterable[str], *, deliver_last: bool = False) -> None:
        """End texts before the next step. Their last events are delivered only if `deliver_last` is set."""
        names = list(names)
        self.engine_thread.abort(names, deliver_last=deliver_last)
        for name in names:
            self.begun(name)


def build(
    engine: EngineLike,
    tokenizer: Tokenizer | None,
    names: Iterator[str],
    prompts: Sequence[Ids],
    params: SamplingParams,
    order: Order,
    images: Sequence[ImageRows] = (),
) -> Iterator[Request]:
    """Yield the engine's requests, one for each text: the first n are for the first prompt. Raises ApiError.

    Args:
        names: the ids of the requests.
        images: those of the only prompt.
    """
    with engine_errors():
        yield from make_requests(engine, tokenizer, names.__next__, prompts, params, order.options, images)


def _size(prompts: Sequence[Ids], params: SamplingParams, texts: int) -> int:
    """Return the size of the work before a request can be queued, in tokens, characters and entries."""
    return sum(map(len, prompts)) + params_size(params) + 32 * texts


def params_size(params: SamplingParams) -> int:
    """Return the number of tokens, characters and entries that parameters list."""
    strings = (*params.stop_strings(), *(params.bad_words or ()))
    return len(params.allowed_token_ids or ()) + len(params.logit_bias or ()) + sum(map(len, strings))


_numbers = itertools.count()


def new_names(count: int) -> list[str]:
    """Return ids for texts that no text of this process has had."""
    return [str(next(_numbers)) for _ in range(count)]
