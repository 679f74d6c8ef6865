"""Write turns with a chat template, and read what it wrote with a response template."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import AnswerTemplate
from jswa.text.chat_template import ChatTemplate
from jswa.text.guard import GUARD, encode_guarded
from jswa.text.tokenizer import Tokenizer
from tests.support.text.kinds import Turn
from tests.support.text.transcripts import calls_of, pieces_of, read, text_of

USER = {"role": "user", "content": "Do it."}
_PLAIN = "Quite so"  # an answer, which shows what a template writes behind one
_UNFINISHED = re.compile(r"[<\[][^>\]\n]*$")  # a delimiter whose end is missing


@dataclass(frozen=True)
class Written:
    """A turn as a chat template writes it: the prompt before it, and its text up to the end of the turn.

    `calls`: how many of the turn's calls the template writes; some write the first one only.
    """

    prompt: str
    text: str
    calls: int


def write(template: ChatTemplate, turn: Turn, **variables: Any) -> Written:
    """Return a turn as the template writes it. Raises InvalidPrompt if the template refuses it."""
    tools = turn.declared()

    def rendered(*messages: Mapping[str, Any], ask: bool = False) -> str:
        return template.render([USER, *messages], tools=tools, add_generation_prompt=ask, **variables)

    message = turn.message()
    whole, asked = rendered(message), rendered(ask=True)
    start = whole.rindex(USER["content"])
    expected = asked[asked.rindex(USER["content"]) :]
    header = _common(expected, whole[start:])
    if header != expected:
        header = _UNFINISHED.sub("", header)  # the template writes what the model is not asked to continue
    start += len(header)
    tail = rendered({"role": "assistant", "content": _PLAIN}).rpartition(_PLAIN)[2]
    text = whole[start:]
    first = {**message, "tool_calls": message["tool_calls"][:1]}
    calls = 1 if len(turn.calls) > 1 and rendered(first) == whole else len(turn.calls)
    return Written(whole[:start], text.removesuffix(tail) if tail else text, calls)


def read_back(answers: AnswerTemplate, tokenizer: Tokenizer, turn: Turn, written: Written, *, tokens: bool) -> str:
    """Return what differs from a turn if it is read from what was written; nothing if all is equal.

    Args:
        tokens: marks within texts become tokens, if they are not special. Otherwise they are spelled, as others are.
    """
    text = _spelled(written.text, turn, tokenizer, special=tokens)
    prefix, tools = answers.prefix(written.prompt), turn.declared()
    ids = encode_guarded(text, tokenizer, add_special_tokens=False).tolist()
    pieces = list(pieces_of(tokenizer, answers, ids))
    events = read(AnswerParser(answers, prefix, tools), pieces)
    if (whole := read(AnswerParser(answers, prefix, tools), ["".join(pieces)])) != events:
        return f"token by token {events!r}, as a whole {whole!r}"
    calls, content, reasoning = calls_of(events), text_of(events, "content"), text_of(events, "reasoning")
    found = [(name, _value(arguments)) for name, arguments in calls]
    meant = list(turn.calls)[: written.calls]
    if len(found) != len(meant) or not all(a == b and same(x, y) for (a, x), (b, y) in zip(found, meant, strict=True)):
        return f"calls {calls!r}, content {content!r}, reasoning {reasoning!r}"
    said = [one.strip() for one in (turn.content, turn.reasoning) if one and one.strip() in written.text]
    left = [content.strip(), reasoning.strip()]
    if any(one not in "\n".join(left) for one in said) or sum(map(len, said)) < sum(map(len, left)):
        return f"content {content!r}, reasoning {reasoning!r}"
    return ""


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1, while 3.0 is 3."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _spelled(text: str, turn: Turn, tokenizer: Tokenizer, *, special: bool) -> str:
    """Return text with a GUARD in each token, or only in each special one, that stands in the turn's arguments.

    None of their texts may be a mark alone, which would be found where it delimits.
    """
    tokens = tokenizer.backend.get_added_tokens_decoder().values()
    added = (one.content for one in tokens if one.special or not special)
    marks = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
    for within in {one for _, arguments in turn.calls for one in _texts(arguments) if marks.search(one)}:
        for form in (within, json.dumps(within, ensure_ascii=False)[1:-1]):
            text = text.replace(form, marks.sub(lambda found: found[0][0] + GUARD + found[0][1:], form))
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(one)


def _common(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    ends = (end for end, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(ends, min(len(one), len(other)))]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return f"not JSON: {text}"
