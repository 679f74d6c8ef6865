"""Grammars and matchers by llguidance; no other module imports it.

A `Grammar` is compiled once and shared. A `Matcher` follows one text: it takes tokens and gives the mask of those that
may follow. Masks are filled outside of Python's lock, those of many matchers in several threads.

Copies of one matcher of llguidance share the automaton of their lexer behind a lock, and an automaton that is too large
or broken fails for all of them. So a grammar has several, its lanes, and one more in reserve: a matcher whose automaton
fails goes on with another one, once. None is compiled in the thread of an engine.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.errors import ConfigError
from jswa.grammar.matching.vocabulary import Description
from jswa.grammar.size.limits import MAX_MASK_SECONDS

MISSING = "needs the package llguidance, which is not installed (pip install llguidance)"
THREADS = max(1, min(8, os.cpu_count() or 1))  # that fill masks
_STACK = 2**28  # bytes of stack of a thread that compiles: rules that name each other are read by recursion
_QUICK = 0.02  # seconds within which a grammar compiles that gets several lanes
_BEARABLE = 0.5  # seconds within which a grammar compiles that gets a second lane
_BYTES, _BYTES_OF_CHARACTER = 150_000, 160  # of a lane, and of each character of the grammar's text
_LONG = 1_000  # characters of a text that is forced
_FEW = 8  # matchers that share a lane before the next one is used
_WATCHED = 16  # masks of a matcher that are timed one by one, after a batch of masks took long
TOO_SLOW = f"to find the tokens that may follow takes more than {MAX_MASK_SECONDS * 1_000:.0f} ms"
COSTLY = f"is too costly: {TOO_SLOW}"
_OF_THE_LANE = ("lexer error", "panic")  # how an error begins that all matchers of a lane share
_LIMITS = re.compile(
    r"Current row has \d+ items; max is \d+|Too many items \(limit \d+; \w+\)|lexer error: too many .*"
)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^]]*)\]?")
_stack_lock = threading.Lock()


class GrammarError(Exception):
    """A grammar cannot be compiled, or allows no text."""


class ParserLimits(NamedTuple):
    """Limits of llguidance, with its names: of a row of its parser, of one mask, of an automaton, of a grammar."""

    max_items_in_row: int = 4_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 100_000
    step_max_items: int = 10_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 50_000


def is_installed() -> bool:
    """Whether the package llguidance is there."""
    return find_spec("llguidance") is not None


class Vocabulary:
    """The tokens of one tokenizer, made once: it takes a second or two for 262,144 tokens.

    Attributes:
        size: number of the model's ids.
        end_ids: tokens that end a text.
        special: ids of the special tokens by their text.
        described: what it was made of.
    """

    def __init__(self, described: Description, vocab_size: int) -> None:
        """Read a description. Raises ConfigError if llguidance is missing or cannot read it."""
        if not is_installed():
            raise ConfigError("structured_outputs", "on", MISSING)
        import llguidance

        try:
            self.inner: Any = llguidance.LLTokenizer(
                described.text, n_vocab=described.size, eos_token=list(described.end_ids)
            )
        except BaseException as error:
            if not _from_library(error):
                raise
            reason = f"llguidance cannot read the model's tokenizer: {_first_line(str(error))}"
            raise ConfigError("structured_outputs", "on", reason) from error
        if not all(map(self.inner.is_special_token, described.special.values())):
            raise ConfigError("structured_outputs", "on", "llguidance numbers the special tokens in another way")
        self.described = described
        self.size = vocab_size
        self.end_ids = described.end_ids
        self.special = described.special
        self.words = -(-described.size // 32)  # of llguidance's masks


class Grammar:
    """A compiled grammar for one vocabulary; `compile_text` makes it. It may be shared by threads.

    Args:
        lane: a matcher at the beginning of a text.
        seconds: of the processor, which compiling it took.

    Attributes:
        size: an estimate of its bytes.
        forces_much: whether it may force hundreds of tokens at once.
        is_costly: whether a text had to end because a mask took too long.
    """

    def __init__(self, vocabulary: Vocabulary, text: str, limits: ParserLimits, lane: Any, seconds: float) -> None:
        self.vocabulary = vocabulary
        self.text = text
        self.limits = limits
        self.seconds = seconds
        self.is_costly = False
        self._more = THREADS if seconds < _QUICK else 1 if seconds < _BEARABLE else 0
        self._lanes = [lane]
        self._whole = [0]  # those that have not failed
        self._made = 0
        self._lock = threading.Lock()
        spaced = "item_separator" in text  # then a model chooses between "," and ", "
        self.forces_much = max(map(len, text.split('"'))) > _LONG or (len(text) > _LONG and not spaced)
        self.size = (1 + self._more) * (_BYTES + _BYTES_OF_CHARACTER * len(text))

    def widen(self) -> None:
        """Compile the other lanes, if there are none yet. Texts may begin before, in the first one."""
        with self._lock:
            more, self._more = self._more, 0
        lanes: list[Any] = []
        if more:
            _with_deep_stack(
                lambda: lanes.extend(_compiled(self.vocabulary, self.text, self.limits) for _ in range(more))
            )
        with self._lock:
            self._whole = [*self._whole, *range(len(self._lanes), len(self._lanes) + len(lanes))]
            self._lanes += lanes

    @property
    def worn(self) -> bool:
        """Whether a lane has failed, so that the grammar should be compiled anew for later texts."""
        return len(self._whole) < len(self._lanes)

    def matcher(self) -> "Matcher":
        """Return a matcher at the beginning of a text."""
        lanes = [lane for lane in self._whole if lane != len(self._lanes) - 1] or self._whole or [0]
        lane = lanes[self._made // _FEW % len(lanes)]
        self._made += 1
        return self._begun(lane)

    def instead_of(self, failed: int) -> "Matcher | None":
        """Return a matcher at the beginning of a text in another lane than one that has failed; None if all have."""
        with self._lock:
            self._whole = [lane for lane in self._whole if lane != failed]
        return self._begun(self._whole[-1]) if self._whole else None

    def _begun(self, lane: int) -> "Matcher":
        return Matcher(self, self._lanes[lane].deep_copy(), lane)


class Matcher:
    """Follows one text. One thread at a time may use it. `lane`: matchers of other lanes share no lock with it."""

    def __init__(self, grammar: Grammar, inner: Any, lane: int) -> None:
        self.grammar = grammar
        self.lane = lane
        self.inner = inner
        self._tokens: list[int] = []
        self._moved = False  # whether it has left a lane that failed
        # Tokens that must follow, the next one last, if masks are filled for them one by one: to fill one takes time
        # that grows with their number.
        self.run: list[int] = []
        self.watched = 0  # masks that are still to be filled by `fill`
        self._is_late = False  # whether a mask took too long

    @property
    def error(self) -> str | None:
        """Why the matcher can go no further; None if it can. Its masks then allow nothing."""
        if self._is_late:
            return TOO_SLOW
        return _first_line(self.inner.get_error()) if self.inner.is_error() else None

    @property
    def exceeded(self) -> str | None:
        """The limit of the parser or of its automaton that the text has exceeded, in words; None if it has not."""
        if self._is_late:
            return TOO_SLOW
        found = _LIMITS.search(self.error or "")
        return found[0] if found else None

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return bool(self.inner.is_stopped() and not self.failed)

    @property
    def failed(self) -> bool:
        """Whether the matcher can go no further."""
        return self._is_late or self.inner.is_error()

    @property
    def accepted(self) -> int:
        """Number of accepted tokens, end tokens included."""
        return len(self._tokens)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens of the text. Return False, and fail for ever, if one of them may not follow.

        End tokens may follow a finished text, any number of them.
        """
        for token in tokens:
            if not self.inner.consume_token(token) and not (self._move() and self.inner.consume_token(token)):
                return False
            self._tokens.append(token)
            if self.run and self.run.pop() != token:
                self.run = []
        return True

    def fill(self, out: Int[np.ndarray, " W"]) -> None:
        """Write the mask of the tokens that may follow: token t in bit t % 32 of word t // 32, W = ⌈V/32⌉ words.

        Where a token is forced it is the only one. A matcher that has failed allows nothing. It fails for ever if this
        takes more than MAX_MASK_SECONDS of this thread's time: `fill_all` has several threads, which it does not time.
        """
        self.watched = max(0, self.watched - 1)
        if not self.run and not self._is_late:
            begin = time.thread_time()
            words = np.zeros(self.grammar.vocabulary.words, np.int32)
            self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            out[:] = words[: len(out)]
            self._is_late = time.thread_time() - begin > MAX_MASK_SECONDS
            self.grammar.is_costly |= self._is_late
        self.finish(out)

    def finish(self, out: Int[np.ndarray, " W"]) -> None:
        """Complete a mask that was filled: it is empty after an error, and has one token where a run is forced."""
        if self.run:
            out[:] = 0
            out.view(np.uint32)[self.run[-1] // 32] = 1 << self.run[-1] % 32
        elif self._is_late:
            out[:] = 0
        elif self.inner.is_error():
            self._refill(out)
        elif self.grammar.forces_much and np.bitwise_count(out.view(np.uint32)).sum() == 1:
            self.run = self.forced()[::-1]

    def watch(self) -> None:
        """Have the next masks filled by `fill`, which finds out whether it is this matcher that takes long."""
        self.watched = _WATCHED

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer itself would write them; often none."""
        found: list[int] = self.inner.compute_ff_tokens()
        return self.inner.compute_ff_tokens() if self.inner.is_error() and self._move() else found

    def copy(self) -> "Matcher":
        """Return an independent matcher at the same place of the text."""
        found = Matcher(self.grammar, self.inner.deep_copy(), self.lane)
        found._tokens, found.watched, found._is_late = self._tokens.copy(), self.watched, self._is_late
        return found

    def _refill(self, out: Int[np.ndarray, " W"]) -> None:
        """Write the mask once more after an error, which another matcher of the lane may have caused."""
        out[:] = 0
        if self._move():
            words = np.zeros(self.grammar.vocabulary.words, np.int32)
            self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not self.inner.is_error():
                out[:] = words[: len(out)]

    def _move(self) -> bool:
        """Go on in another lane, once, if this one has failed; return whether that helped. Nothing is compiled."""
        if not self.inner.get_error().startswith(_OF_THE_LANE):
            return False  # it is the text's own: its rows are too long, or a token may not follow
        other = self.grammar.instead_of(self.lane)
        if self._moved or other is None or not all(map(other.inner.consume_token, self._tokens)):
            return False
        self.lane, self.inner, self._moved = other.lane, other.inner, True
        return True


def compile_text(vocabulary: Vocabulary, text: str, limits: ParserLimits) -> Grammar:
    """Compile the first lane of a grammar: Lark, or llguidance's JSON. Other threads can run meanwhile.

    Raises GrammarError if it is not valid, exceeds a limit or allows no text.
    """
    made: list[tuple[Any, float]] = []

    def work() -> None:
        begin = time.thread_time()
        lane = _compiled(vocabulary, text, limits)
        made.append((lane, time.thread_time() - begin))
        lane.compute_bitmask()  # fails if no text begins

    _with_deep_stack(work)
    [(lane, seconds)] = made
    if lane.is_error():
        raise GrammarError(_reason(lane.get_error()))
    return Grammar(vocabulary, text, limits, lane, seconds)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF (`root ::= …`)."""
    return re.search(r"^[ \t]*[\w-]+\s*::=", text, re.MULTILINE) is not None


def lark_of(text: str) -> str:
    """Return a grammar in Lark that is written in GBNF. Raises GrammarError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"cannot be read as GBNF: {_first_line(str(error))}") from error


def explain(text: str, limits: ParserLimits) -> str | None:
    """Return why a grammar is not valid, without a vocabulary; None if it is."""
    import llguidance

    found: list[str] = []
    _with_deep_stack(lambda: found.append(llguidance.LLMatcher.validate_grammar(text, limits=_limits(limits))))
    return _reason(found[0]) if found and found[0] else None


@lru_cache
def executor(threads: int) -> Any:
    """Return what fills masks in so many threads."""
    import llguidance

    return llguidance.LLExecutor(threads)


def _compiled(vocabulary: Vocabulary, text: str, limits: ParserLimits) -> Any:
    import llguidance

    return llguidance.LLMatcher(vocabulary.inner, text, log_level=0, limits=_limits(limits))


def _limits(limits: ParserLimits) -> Any:
    import llguidance

    return llguidance.LLParserLimits(**limits._asdict(), verbose_errors=False)


def _with_deep_stack(work: Callable[[], None]) -> None:
    """Run `work` in a thread whose stack does not overflow. Raises what it raises."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="jswa-grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        if not _from_library(failed[0]):
            raise failed[0]
        raise GrammarError(_reason(str(failed[0]))) from failed[0]


def _from_library(error: BaseException) -> bool:
    """Whether llguidance may have raised the error: a ValueError, or a Rust panic, which is only a BaseException."""
    return isinstance(error, ValueError) or type(error).__name__ == "PanicException"


def _reason(message: str) -> str:
    """Return an error of llguidance as the reason of a refusal."""
    line = _first_line(message)
    if line.startswith("panic: assertion failed: grammar.symbols"):
        return "it has too many rules"
    return "it allows no text" if line.startswith("NoExtension") else line


def _first_line(message: str) -> str:
    """Return the line of an error that says what is wrong: regular expressions are shown before it."""
    lines = message.strip().splitlines() or [""]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = f"regular expression: {said[0]}" if said else lines[0]
    return _UNIMPLEMENTED.sub(_unsupported, line)[:300]


def _unsupported(found: re.Match[str]) -> str:
    """Return what is said about keywords of a schema that llguidance does not have."""
    names = found[1].replace('"', "")
    return f"{names} {'are' if ',' in names else 'is'} not supported"
