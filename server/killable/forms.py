"""A kind of processes that can be killed: they try the forms that clients ask for.

A question is an `Asked`, as JSON, which has whole numbers of any size. The answer is the text of its grammar after the
letter T, if that can be compiled in little time; or else a `Refusal`, as JSON; or after the letter F why the process
has failed. An empty question follows: the answer is why texts that follow the grammar would cost too much, and is empty
if they do not. Meanwhile the engine's process compiles the grammar too.
"""

import json
import os

import msgspec

from jswa.grammar.asked import Asked, Refusal, limits_of, refusal, text_of
from jswa.grammar.bounds import SchemaError
from jswa.grammar.matching.llg import Grammar, GrammarError, ParserLimits, Vocabulary, compile_text
from jswa.grammar.matching.trial import costly
from jswa.grammar.matching.vocabulary import Description
from jswa.grammar.size.limits import MAX_COMPILE_SECONDS
from jswa.grammar.texts import unforced

from .worker import MEMORY, NICE, Answer

TOO_LARGE = f"is too costly: to compile it takes more than {MAX_COMPILE_SECONDS:g} s of the processor"


class VocabularyLoad(msgspec.Struct):
    """What all processes share.

    Attributes:
        vocab_size: number of the model's ids.
    """

    described: Description
    vocab_size: int
    limits: ParserLimits


def load(data: bytes) -> tuple[Vocabulary, ParserLimits]:
    """Return the vocabulary, and the limits of grammars."""
    said = msgspec.msgpack.decode(data, type=VocabularyLoad)
    return Vocabulary(said.described, said.vocab_size), said.limits


def begin(loaded: tuple[Vocabulary, ParserLimits], first: bytes) -> Answer:
    """Return what answers questions."""
    os.nice(NICE)
    return Trial(*loaded).answer


def packed(asked: Asked) -> bytes:
    """Return a question."""
    return json.dumps(msgspec.to_builtins(asked)).encode()


def read(answer: bytearray) -> str | Refusal:
    """Return what a process has answered to a form. Raises RuntimeError if it has failed."""
    if answer[:1] == b"T":
        return str(memoryview(answer)[1:], "utf-8")
    if answer[:1] == b"F":
        raise RuntimeError(f"a form could not be tried: {str(memoryview(answer)[1:], 'utf-8')}")
    return Refusal(*json.loads(answer))


class Trial:
    """What one process knows: the last form's grammar."""

    def __init__(self, vocabulary: Vocabulary, limits: ParserLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._grammar: Grammar | None = None

    def answer(self, question: bytes) -> bytes:
        """Answer a question."""
        if not question:
            assert self._grammar is not None
            return (costly(self._grammar) or "").encode()
        try:
            found = self._compiled(msgspec.convert(json.loads(question), Asked))
        except RecursionError:
            found = Refusal("is nested too deeply")
        except MemoryError:
            found = Refusal(f"is too costly: it takes more than {MEMORY // 2**30} GiB of memory")
        except Exception as error:  # a fault of jswa, which is no fault of the form
            return b"F" + f"{type(error).__name__}: {error!s:.1000}".encode(errors="replace")
        return b"T" + found.encode() if isinstance(found, str) else json.dumps(found).encode()

    def _compiled(self, asked: Asked) -> str | Refusal:
        """Compile the grammar that is asked for. Return its text; or why there is none."""
        special, ends = self._vocabulary.special, self._vocabulary.end_ids
        self._grammar = None
        try:
            text = text_of(asked, special, ends)
            self._grammar = compile_text(self._vocabulary, unforced(text, special), limits_of(text, self._limits))
        except (SchemaError, GrammarError) as error:
            return refusal(asked, error, special, self._limits)
        return text if self._grammar.seconds <= MAX_COMPILE_SECONDS else Refusal(TOO_LARGE)
