"""What models of the families write, and the answers that it means."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jswa.plan import TokenEvent
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import AnswerTemplate, compile_template, shipped
from jswa.text.assembler import Assembler
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import AnswerEvent, SamplingParams

_FN = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip
TOOLS = [_FN]


@dataclass(frozen=True)
class Transcript:
    """A generated text of a family, behind a rendered prompt, and what it means.

    Attributes:
        family: name of the shipped response template.
        special: the tokens of the family's tokenizer that its delimiters consist of, special or not.
        calls: name and arguments of each tool call.
    """

    family: str
    special: tuple[str, ...]
    prompt: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    tools: Sequence[dict[str, Any]] = field(default_factory=lambda: TOOLS)


_FILE = Path(__file__).with_suffix(".json")


def _transcript(about: dict[str, Any]) -> Transcript:
    lists = {"special": tuple(about["special"]), "calls": tuple((name, text) for name, text in about["calls"])}
    return Transcript(**{**about, **lists})


TRANSCRIPTS = tuple(map(_transcript, json.loads(_FILE.read_text(encoding="utf-8"))))
# Tokens that are not special, of Qwen and GLM.
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@cache
def tokenizer_of(special: tuple[str, ...]) -> Tokenizer:
    """Return a byte-level tokenizer without merges, with these added tokens; those of PLAIN are not special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=text not in PLAIN, normalized=False) for text in special])
    return Tokenizer(backend)


@cache
def template_of(family: str, tokenizer: Tokenizer) -> AnswerTemplate:
    """Return a shipped template for a tokenizer."""
    return compile_template(shipped()[family], tokenizer)


def pieces_of(tokenizer: Tokenizer, template: AnswerTemplate, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token, as an `Assembler` gives it; the last token is not a stop token."""
    none = tokenizer.encode("", add_special_tokens=False)
    assembler = Assembler(
        tokenizer, none, SamplingParams(), StopTable(()), delimiters=template.delimiters, hidden=template.hidden
    )
    for index, token in enumerate(ids):
        yield assembler.push(TokenEvent("0", token, "length" if index == len(ids) - 1 else None))


def merged(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """Return events with the texts of neighbours of one kind and call joined."""
    found: list[AnswerEvent] = []
    for event in events:
        if found and event.kind not in ("call", "end") and found[-1][0::2] == event[0::2]:
            found[-1] = event._replace(text=found[-1].text + event.text)
        else:
            found.append(event)
    return found


def read(parser: AnswerParser, pieces: Sequence[str]) -> list[AnswerEvent]:
    """Return the merged events of an answer."""
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def text_of(events: Sequence[AnswerEvent], kind: str) -> str:
    """Return the text of all events of a kind."""
    return "".join(event.text for event in events if event.kind == kind)


def calls_of(events: Sequence[AnswerEvent]) -> tuple[tuple[str, str], ...]:
    """Return name and arguments of each tool call. Every call has begun and ended once."""
    names = [event.text for event in events if event.kind == "call"]
    assert [event.call for event in events if event.kind == "call"] == list(range(len(names)))
    assert [event.call for event in events if event.kind == "end"] == list(range(len(names)))
    return tuple(
        (name, "".join(e.text for e in events if e.kind == "arguments" and e.call == call))
        for call, name in enumerate(names)
    )
