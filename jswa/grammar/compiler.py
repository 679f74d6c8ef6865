"""Compiles what a request asks for into a grammar, and keeps the compiled ones of an engine."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable

from jswa.errors import ConfigError, InvalidSampling
from jswa.grammar.asked import form_fault, limits_of
from jswa.grammar.bounds import SchemaError
from jswa.grammar.matching.llg import (
    COSTLY,
    MISSING,
    Grammar,
    GrammarError,
    ParserLimits,
    Vocabulary,
    compile_text,
    is_installed,
)
from jswa.grammar.matching.vocabulary import describe
from jswa.grammar.texts import grammar_text, unforced
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams, StructuredOutputsParams

MOST_GRAMMARS = 256
_MOST_COSTLY = 4_096
MOST_BYTES = 2**27  # of the grammars that are kept, as `Grammar.size` estimates them


def asked_grammar(grammars: "Grammars | None", params: SamplingParams) -> Grammar | None:
    """Return the compiled grammar of a request's structured outputs, None without any. Raises InvalidSampling."""
    asked = params.structured_outputs
    if asked is not None and grammars is None:
        raise InvalidSampling("structured_outputs", asked.form, "needs an engine with a tokenizer")
    return None if asked is None or grammars is None else grammars.compile(asked)


class Grammars:
    """The grammars of one engine. Any thread may use it.

    The vocabulary is made when the first grammar is asked for, or by `warm_up`.

    Args:
        tokenizer: the model's; None: no grammar can be compiled.
        vocab_size: number of the model's ids.
        end_ids: tokens that end a text.
        delimiters: tokens that delimit the parts of an answer, and are no part of any text.
        most_grammars, most_bytes: the compiled grammars that are kept, and their bytes. The last one always is.

    Attributes:
        seconds: time that compiling has taken so far.
        compiled, found: grammars that were compiled, and those that were there already.
        limits: those of each grammar, unless a client writes a part of it in Lark or GBNF.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: Iterable[int],
        delimiters: Collection[int] = (),
        *,
        limits: ParserLimits | None = None,
        most_grammars: int = MOST_GRAMMARS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._delimiters = frozenset(delimiters)
        self.limits = limits or ParserLimits()
        self._most = most_grammars, most_bytes
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._costly: OrderedDict[bytes, None] = OrderedDict()  # digests of texts that are not kept
        self._bytes = 0
        self._lock = threading.Lock()
        self.seconds = 0.0
        self.compiled = self.found = 0

    def delimit(self, delimiters: Collection[int]) -> None:
        """Take these tokens for delimiters as well. Grammars that were compiled before keep their vocabulary."""
        with self._making, self._lock:
            if not self._delimiters.issuperset(delimiters):
                self._delimiters |= frozenset(delimiters)
                self._vocabulary = None
                self._kept.clear()
                self._bytes = 0

    def warm_up(self) -> None:
        """Make the vocabulary. It holds Python's lock for a second or two if there are 262,144 tokens.

        Raises ConfigError if llguidance is missing, or cannot read the tokenizer, or there is no tokenizer.
        """
        with self._making:
            if self._vocabulary is None:
                if not is_installed():
                    raise ConfigError("structured_outputs", "on", MISSING)
                if self._tokenizer is None:
                    raise ConfigError("structured_outputs", "on", "needs a tokenizer.json, which the checkpoint lacks")
                described = describe(self._tokenizer, self._vocab_size, self._end_ids, self._delimiters)
                self._vocabulary = Vocabulary(described, self._vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary. Raises InvalidSampling if there can be none."""
        try:
            self.warm_up()
        except ConfigError as error:
            raise InvalidSampling("structured_outputs", error.value, error.limit) from error
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def is_warm(self) -> bool:
        """Whether the vocabulary is there."""
        return self._vocabulary is not None

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a specification, compiled now or before. Raises InvalidSampling.

        A specification whose `grammar` is the text of a grammar that is kept is that one.
        """
        vocabulary = self.vocabulary
        known = None if spec.grammar is None else self.find(spec.grammar)
        if known is not None:
            return known
        begin = time.perf_counter()
        try:
            text = grammar_text(spec, vocabulary.special)
        except SchemaError as error:
            raise _refused(spec, str(error)) from error
        self.seconds += time.perf_counter() - begin
        known = self.find(text)
        if known is not None and not known.worn:
            return known
        try:
            made = self._compiled(text)
        except GrammarError as error:
            raise _refused(spec, form_fault(spec, str(error), vocabulary.special, self.limits)) from error
        made.widen()
        return made

    def add(self, text: str) -> Grammar:
        """Compile the first lane of a grammar, and keep it. Other threads can run meanwhile. Raises InvalidSampling."""
        spec = StructuredOutputsParams(grammar=text)
        try:
            return self._compiled(text)
        except GrammarError as error:
            raise _refused(spec, str(error)) from error

    def find(self, text: str) -> Grammar | None:
        """Return the grammar of a text, if it is kept. Raises InvalidSampling if it is known to cost too much."""
        with self._lock:
            known = self._kept.get(text)
            if (known is not None and known.is_costly) or _digest(text) in self._costly:
                raise InvalidSampling("structured_outputs", "", COSTLY)
            if known is not None:
                self._kept.move_to_end(text)
                self.found += 1
            return known

    def _compiled(self, text: str) -> Grammar:
        """Compile a grammar, and keep it. Raises GrammarError."""
        vocabulary, begin = self.vocabulary, time.perf_counter()
        try:
            made = compile_text(vocabulary, unforced(text, vocabulary.special), limits_of(text, self.limits))
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begin
                self.compiled += 1
        self._keep(text, made)
        return made

    def _keep(self, text: str, grammar: Grammar) -> None:
        with self._lock:
            if grammar.vocabulary is not self._vocabulary:
                return  # `delimit` was called meanwhile
            before = self._kept.pop(text, None)
            self._kept[text] = grammar
            self._bytes += grammar.size - (0 if before is None else before.size)
            while len(self._kept) > self._most[0] or (self._bytes > self._most[1] and len(self._kept) > 1):
                text, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size
                if dropped.is_costly:
                    self._costly[_digest(text)] = None
                    while len(self._costly) > _MOST_COSTLY:
                        self._costly.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of grammars that are kept."""
        return len(self._kept)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _refused(spec: StructuredOutputsParams, reason: str) -> InvalidSampling:
    return InvalidSampling(f"structured_outputs.{spec.form}", getattr(spec, spec.form), reason)
