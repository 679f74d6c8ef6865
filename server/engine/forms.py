"""The forms of answers that requests ask for: tried in a process that can be killed, then compiled in this one."""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from jswa.errors import InvalidSampling
from jswa.grammar.asked import Refusal
from jswa.grammar.compiler import Grammars
from jswa.grammar.matching.llg import Grammar, Vocabulary

from ..core.counts import Load
from ..core.fairness import Helpers, Key, Weights
from ..http.errors import ApiError
from ..killable.forms import VocabularyLoad, read
from ..killable.pool import EndedError, NotStartedError, Pool
from ..killable.worker import MEMORY, NICE

_log = logging.getLogger("jswa.server")
SECONDS = 5.0  # of the processor, to read a form, compile it and try it
TIMEOUT = 30.0  # seconds, while other processes have the processor
_COMPILERS = 2  # threads
_MOST_COSTLY = 4_096  # forms that ended their process
_COSTLY = f"is too costly: it takes more than {SECONDS:g} s of the processor, or {MEMORY // 2**30} GiB of memory"


class Made(NamedTuple):
    """The text of a grammar that the engine has compiled; or why there is none, and which tool is at fault, if any."""

    text: str = ""
    refused: str | None = None
    tool: int | None = None


class Forms:
    """The forms that requests of all keys ask for. Owns the processes, from `start` or the first form to `close`.

    A form costs its time once, whoever asks for it: the same form of another request or another key is found. A form
    that ended its process is not tried again.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._compilers = Helpers(_COMPILERS, weights)
        self._vocabulary: Vocabulary | None = None  # that of the pool
        self.pool: Pool | None = None
        self._beginning = asyncio.Lock()
        self._found: WeakValueDictionary[bytes, Grammar] = WeakValueDictionary()  # by digest of the question
        self._costly: OrderedDict[bytes, None] = OrderedDict()
        self._killed = 0
        self._running: dict[tuple[Key, bytes], _Shared] = {}
        self._widening: set[asyncio.Task[None]] = set()

    async def compile(self, grammars: Grammars, question: bytes, delimiters: Collection[int], key: Key) -> Made:
        """Return the text of the grammar that a request asks for. The engine finds the grammar without further work.

        If all callers of one form are cancelled, the process that tries it is killed. Raises ApiError.

        Args:
            grammars: the engine's.
            question: an `Asked`, as `jswa.grammar.asked` has it, packed.
            delimiters: tokens that delimit the parts of an answer.
        """
        try:
            pool = await self.begin(grammars, delimiters)
        except InvalidSampling as error:
            return Made(refused=error.limit)
        digest = hashlib.blake2b(question, digest_size=16).digest()
        known = self._known(grammars, digest)
        if known is not None:
            return known
        shared = self._running.get((key, digest))
        if shared is None:  # another key's caller would wait for that key's turn
            task = asyncio.ensure_future(self._made(pool, grammars, question, digest, key))
            shared = self._running[key, digest] = _Shared(task)
        shared.callers += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.callers -= 1
            if not shared.callers:
                del self._running[key, digest]
                shared.task.cancel()

    async def begin(self, grammars: Grammars, delimiters: Collection[int] = ()) -> Pool:
        """Return the processes, started anew if the vocabulary has changed.

        Raises InvalidSampling if there can be no vocabulary.
        """
        grammars.delimit(delimiters)
        if self.pool is not None and grammars.is_warm and grammars.vocabulary is self._vocabulary:
            return self.pool
        async with self._beginning:
            vocabulary = await asyncio.to_thread(lambda: grammars.vocabulary)
            if self.pool is None or vocabulary is not self._vocabulary:
                before, self._vocabulary = self.pool, vocabulary
                self.pool = Pool("forms", lambda: _load(vocabulary, grammars), b"", SECONDS, self._weights)
                if before is not None:
                    await before.close()
            return self.pool

    async def start(self, grammars: Grammars) -> None:
        """Start the processes in the background, so that the first form does not wait for them."""
        (await self.begin(grammars)).start_spare()

    def load(self) -> Load:
        """Return what the processes have to do, and what they have refused."""
        lanes = None if self.pool is None else self.pool.lanes
        waiting, refused = (0, 0) if lanes is None else (lanes.waiting, lanes.refused)
        return Load(form_waiting=waiting, form_refused=refused, form_killed=self._killed)

    async def close(self) -> None:
        """End the processes, and what is under way."""
        tasks = [*self._widening, *(shared.task for shared in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._beginning:
            if self.pool is not None:
                await self.pool.close()
        self._compilers.close()

    def _known(self, grammars: Grammars, digest: bytes) -> Made | None:
        """Return what is known of a form."""
        if digest in self._costly:
            return Made(refused=_COSTLY)
        grammar = self._found.get(digest)
        try:
            kept = grammar is not None and grammars.find(grammar.text) is grammar
        except InvalidSampling as error:
            return Made(refused=error.limit)
        return Made(grammar.text) if grammar is not None and kept and not grammar.worn else None

    async def _made(self, pool: Pool, grammars: Grammars, question: bytes, digest: bytes, key: Key) -> Made:
        """Try a form and compile it. Raises ApiError (429)."""
        for _ in range(2):
            begin = time.monotonic()
            try:
                return await self._tried(pool, grammars, question, digest, key)
            except NotStartedError as error:
                raise ApiError(500, "no process that tries forms could be started") from error
            except (TimeoutError, EndedError) as error:
                _log.warning("a form has ended the process that tried it: %s", error or "it took too long")
                if time.monotonic() - begin > SECONDS:
                    break  # its time was over; else someone may have killed it
        self._costly[digest] = None
        if len(self._costly) > _MOST_COSTLY:
            self._costly.popitem(last=False)
        self._killed += 1
        return Made(refused=_COSTLY)

    async def _tried(self, pool: Pool, grammars: Grammars, question: bytes, digest: bytes, key: Key) -> Made:
        """Have a form compiled in a process, then here while the process follows texts. Raises EndedError, ApiError."""
        async with pool.taken(key) as worker:
            text = await worker.ask(lambda: question, read, TIMEOUT)
            if isinstance(text, Refusal):
                return Made("", *text)
            found = await asyncio.gather(
                worker.ask(bytes, lambda answer: answer.decode(), TIMEOUT),
                self._compilers.run(key, partial(_nicely, partial(_compiled, grammars, text))),
                return_exceptions=True,  # both have ended before the process is free
            )
        for one in found:
            if isinstance(one, InvalidSampling):
                return Made(refused=one.limit)
            if isinstance(one, BaseException):
                raise one
        reason, grammar = found
        assert isinstance(grammar, Grammar)
        if reason:
            grammar.is_costly = True
            return Made(refused=str(reason))
        self._found[digest] = grammar
        widening = asyncio.ensure_future(self._widen(grammar, key))
        self._widening.add(widening)
        widening.add_done_callback(self._widening.discard)
        return Made(text)

    async def _widen(self, grammar: Grammar, key: Key) -> None:
        """Compile the other lanes of a grammar. Without them it works too."""
        with suppress(ApiError, RuntimeError):  # too many wait, or the server shuts down
            await self._compilers.run(key, partial(_nicely, grammar.widen))


@dataclass
class _Shared:
    """A task for several callers, which is cancelled when the last one is."""

    task: "asyncio.Task[Made]"
    callers: int = 0


def _load(vocabulary: Vocabulary, grammars: Grammars) -> bytes:
    return msgspec.msgpack.encode(VocabularyLoad(vocabulary.described, vocabulary.size, grammars.limits))


def _nicely[T](work: Callable[[], T]) -> T:
    """Do work in a thread that steps of the engine precede."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    return work()


def _compiled(grammars: Grammars, text: str) -> Grammar:
    """Return the grammar of a text, compiled now unless it is kept."""
    known = grammars.find(text)
    return grammars.add(text) if known is None or known.worn else known
