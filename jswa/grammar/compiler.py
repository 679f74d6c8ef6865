"""Compiles what a request asks for into a grammar, and keeps the compiled ones of an engine."""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from jswa.errors import ConfigError, InvalidSampling
from jswa.grammar.llg import (
    MISSING,
    Grammar,
    GrammarError,
    ParserLimits,
    Vocabulary,
    compile_text,
    explain,
    is_installed,
)
from jswa.grammar.schema import SchemaError, check_schema, locate, read_json
from jswa.grammar.texts import SPACED, UNFORCED, grammar_text, json_options, schema_grammar, unforced
from jswa.grammar.vocabulary import describe
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams, StructuredOutputsParams

MOST_GRAMMARS = 256
MOST_BYTES = 2**27  # of the grammars that are kept, as `Grammar.size` estimates them


# Of a grammar that a client writes, which may be ambiguous: a row of 500 items takes 0.1 s.
_NARROW = {"max_items_in_row": 300, "step_max_items": 5_000}


def compile_grammar(
    spec: StructuredOutputsParams, vocabulary: Vocabulary, limits: ParserLimits | None = None
) -> Grammar:
    """Return the grammar of a specification. Raises InvalidSampling, which names the place in a schema."""
    return _compile(spec, _text(spec, vocabulary), vocabulary, _narrow(spec, limits or ParserLimits()))


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
        self._limits = limits or ParserLimits()
        self._most = most_grammars, most_bytes
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
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

    def compile(self, spec: StructuredOutputsParams, answer: str | None = None) -> Grammar:
        """Return the grammar of a specification, compiled now or before. Raises InvalidSampling.

        Args:
            answer: the text of the grammar of a whole answer, of which the specification is a part. Then a later call
                with this text as the specification's `grammar` returns the same, and compiles nothing.
        """
        begin = time.perf_counter()
        vocabulary = self.vocabulary
        known = None if answer is not None or spec.grammar is None else self._find(spec.grammar)
        if known is not None:
            return known
        text = _text(spec, vocabulary) if answer is None else answer
        known = self._find(text)
        if known is not None and not known.worn:
            return known
        try:
            made = _compile(spec, text, vocabulary, _narrow(spec, self._limits))
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begin
                self.compiled += 1
        self._keep(text, made)
        return made

    def keeps(self, text: str) -> bool:
        """Whether the grammar of this text is kept."""
        return self._find(text) is not None

    def restore(self, text: str) -> None:
        """Compile the text of a grammar once more that is kept no longer. Raises InvalidSampling."""
        spec = StructuredOutputsParams(grammar=text)
        limits = _narrow(spec, self._limits) if UNFORCED in text else self._limits
        self._keep(text, _compile(spec, text, self.vocabulary, limits))

    def _find(self, text: str) -> Grammar | None:
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                self.found += 1
            return known

    def fault(self, schema: Any) -> SchemaError | None:
        """Return why a schema cannot be compiled, and its place; None if it can."""
        try:
            checked = check_schema(read_json(schema))
            reason = explain(schema_grammar(checked, SPACED), self._limits)
        except SchemaError as error:
            return error
        if reason is None:
            return None
        return locate(checked, reason, lambda part: explain(schema_grammar(part, SPACED), self._limits))

    def _keep(self, text: str, grammar: Grammar) -> None:
        with self._lock:
            if grammar.vocabulary is not self._vocabulary:
                return  # `delimit` was called meanwhile
            before = self._kept.pop(text, None)
            self._kept[text] = grammar
            self._bytes += grammar.size - (0 if before is None else before.size)
            while len(self._kept) > self._most[0] or (self._bytes > self._most[1] and len(self._kept) > 1):
                self._bytes -= self._kept.popitem(last=False)[1].size

    def __len__(self) -> int:
        """Return the number of grammars that are kept."""
        return len(self._kept)


def _narrow(spec: StructuredOutputsParams, limits: ParserLimits) -> ParserLimits:
    return limits if spec.grammar is None else limits._replace(**_NARROW)


def _text(spec: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
    try:
        return grammar_text(spec, vocabulary.special)
    except SchemaError as error:
        raise _refused(spec, str(error)) from error


def _compile(spec: StructuredOutputsParams, text: str, vocabulary: Vocabulary, limits: ParserLimits) -> Grammar:
    try:
        return compile_text(vocabulary, unforced(text, vocabulary.special), limits)
    except GrammarError as error:
        if spec.json is None:
            raise _refused(spec, str(error)) from error
        spaces = json_options(spec)
        schema = check_schema(read_json(spec.json))
        found = locate(schema, str(error), lambda part: explain(schema_grammar(part, spaces), limits))
        raise _refused(spec, str(found)) from error


def _refused(spec: StructuredOutputsParams, reason: str) -> InvalidSampling:
    return InvalidSampling(f"structured_outputs.{spec.form}", getattr(spec, spec.form), reason)
