"""One text while the engine generates it: its events become characters, parts of an answer, and a reason to end.

`LLM`, `AsyncLLM`, the server and rollouts share this machine.

    TokenEvent ──► Assembler ──► AnswerParser ──► Part
    token          characters    reasoning,       what the
                   up to a stop  content, calls   text gains
                   string

A text may be given in parts of several tokens, or whole. If nobody wants a part of it before its end, and no stop
string may end it, then nothing is decoded before the end: the ids are appended to a list, and decoded at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.plan import TokenEvent
from jswa.text.answers.parser import Answering, AnswerParser
from jswa.text.assembler import Assembler
from jswa.text.detokenizer import decode_behind
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import AnswerEvent, DraftCounts, FinishReason, SamplingParams

_TOKEN_ALONE = TokenEvent("", None)[2:-1]  # the fields of an event that has a token, and counts of drafts at most
_TEXTS = ("content", "reasoning", "arguments")  # kinds of answer events that add text


class Part(NamedTuple):
    """The characters and the answer's events that one event of the engine, or several, add to a text.

    Attributes:
        new: characters. Those of an answer have the marks of its delimiters.
        events: empty if the text is no answer.
    """

    new: str
    events: Sequence[AnswerEvent]


class GeneratedText:
    """One text. Push its events until it has a `finish_reason`; it may end before the engine ends its request.

    Attributes:
        parser: of a text that is an answer; otherwise None.
        interval: tokens of a part; None if the text is given whole.
        tokens: the ids so far, of a text that is given whole.
        finish_reason, stop_reason: how the text has ended, and at which stop token or string; None before.
        drafts: counts of the text's drafts so far; None if no event had any.
        version: the version of the weights that compute the next token.
        versions: the versions of earlier tokens; of all tokens once a text that is given whole has ended.
        reasoning_tokens: tokens of reasoning so far.
    """

    def __init__(
        self,
        assembler: Assembler | None,
        parser: AnswerParser | None = None,
        *,
        interval: int | None = 1,
        decode: Callable[[list[int]], str] | None = None,
        version: int = 0,
    ) -> None:
        """Begin a text.

        Args:
            assembler: None if the text is decoded when it ends, or not at all.
            interval: tokens of a part; None: the text is given whole.
            decode: returns the text of tokens, if there is no assembler.
        """
        self.parser = parser
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.drafts: DraftCounts | None = None
        self.version = version
        self.versions: list[int] = []
        self.reasoning_tokens = 0
        self._assembler = assembler
        self._decode = decode
        self.interval = interval
        self._held: list[Part] = []

    @property
    def offset(self) -> int:
        """Characters decoded so far, including those that may begin a stop string."""
        return 0 if self._assembler is None else self._assembler.offset

    @property
    def collects(self) -> bool:
        """Whether the text is decoded only at its end. Its receiver calls `collect` with each event.

        The receiver may append a token without anything else to `tokens` itself.
        """
        return self.interval is None and self._assembler is None

    def collect(self, event: TokenEvent) -> None:
        """Note the token and the version of an event, of a text that `collects`. `push` must see its end."""
        if event.version is not None:
            self._change(event.version)
        if event.token is not None:
            self.tokens.append(event.token)

    def add(self, token: int) -> Part | None:
        """Return the part that a token without anything else adds. The fast path of `push`; law: equal results."""
        assert self._assembler is not None
        part = self._read(self._assembler.add(token), is_token=True)
        if self.interval == 1:
            return part
        if self.interval is None:
            self.tokens.append(token)
        return self._given(part, token_alone=True)

    def push(self, event: TokenEvent) -> Part | None:
        """Return the part that an event completes; None if the part needs further events."""
        if event.version is not None:
            self._change(event.version)
            return None
        self.drafts = event.drafts or self.drafts
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if event.token is not None and self.interval is None and self._assembler is not None:
            self.tokens.append(event.token)
        part = self._read(self._characters(event), is_token=event.token is not None)
        if self.interval == 1:
            return part
        return self._given(part, token_alone=event[2:-1] == _TOKEN_ALONE)

    def _characters(self, event: TokenEvent) -> str:
        if self._assembler is not None:
            return self._assembler.push(event)
        if self._decode is None or event.finish_reason is None:
            return ""
        return self._decode(self.tokens[:-1] if event.is_stop_token else self.tokens)

    def _read(self, new: str, *, is_token: bool) -> Part:
        """Return new characters with an answer's events of them, and see whether the text ends by what it says."""
        parser, assembler = self.parser, self._assembler
        stopped = None if assembler is None else assembler.stopped
        if parser is None:
            if stopped is not None:
                self.finish_reason, self.stop_reason = "stop", stopped
            return Part(new, ())
        self.reasoning_tokens += is_token and parser.in_reasoning
        events = parser.feed(new)
        if stopped is not None or parser.done:
            self.finish_reason, self.stop_reason = "stop", stopped
        return Part(new, events if self.finish_reason is None else events + parser.finish())

    def _given(self, part: Part, *, token_alone: bool) -> Part | None:
        """Return all parts that were held and the new one, or hold it too and return None."""
        self._held.append(part)
        held, interval = self._held, self.interval
        if self.finish_reason is None and (interval is None or (token_alone and len(held) < interval)):
            return None
        if interval is None:
            self._change(self.version)
        self._held = []
        if len(held) == 1:
            return part
        return Part("".join(one.new for one in held), _joined([event for one in held for event in one.events]))

    def _change(self, version: int) -> None:
        """Note that the next tokens come from weights of another version."""
        self.versions += [self.version] * (len(self.tokens) - len(self.versions))
        self.version = version


def generated_text(
    answering: Answering | None,
    tokenizer: Tokenizer | None,
    prefix: str,
    ids: Int[np.ndarray, " P"],
    params: SamplingParams,
    stops: StopTable,
    *,
    interval: int | None = 1,
    version: int = 0,
) -> GeneratedText:
    """Begin a text behind a prompt.

    Args:
        answering: how the text is read as an answer; None if it is not.
        tokenizer: None if the checkpoint has none: then the text is empty.
        prefix: of the prompt, as `Answering` gives it.
        ids: of the prompt.
        stops: the table of the parameters' stop strings.
        interval: tokens of a part; None: the text is given whole.
    """
    if answering is None:
        if interval is None and not params.stop_strings():
            skip = params.skip_special_tokens
            decode = None if tokenizer is None else partial(decode_behind, tokenizer, ids, skip_special_tokens=skip)
            return GeneratedText(None, interval=None, decode=decode, version=version)
        return GeneratedText(Assembler(tokenizer, ids, params, stops), interval=interval, version=version)
    template = answering.template
    parser = AnswerParser(template, prefix, answering.tools, parallel=answering.parallel, form=answering.form)
    delimiters, hidden = ({}, ()) if template is None else (template.delimiters, template.hidden)
    assembler = Assembler(tokenizer, ids, params, stops, delimiters=delimiters, hidden=hidden)
    return GeneratedText(assembler, parser, interval=interval, version=version)


def _joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Return events of which those that add to the same text are one."""
    found: list[AnswerEvent] = []
    for (kind, call), group in groupby(events, lambda event: (event.kind, event.call)):
        if kind in _TEXTS:
            found.append(AnswerEvent(kind, "".join(event.text for event in group), call))
        else:
            found += group
    return found
