"""What models of the families write, and the answers that it means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jswa.plan import TokenEvent
from jswa.text.answers.parser import AnswerEvent, AnswerParser
from jswa.text.answers.template import AnswerTemplate, compile_template, shipped
from jswa.text.assembler import Assembler
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

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


_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_GEMMA4 = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
           "<tool_response|>", '<|"|>')  # fmt: skip
_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_CHATML_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[/TOOL_RESULTS]")
_LLAMA = ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_start|>", "<|python_end|>")
_LLAMA_PROMPT = "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n"
_COMMAND = ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>",
            "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")  # fmt: skip
_COMMAND_PROMPT = "<|START_OF_TURN_TOKEN|>hi<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
_OSLO = ("get_weather", '{"city": "Oslo"}')

TRANSCRIPTS = (
    Transcript(
        "harmony", _HARMONY, "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>They greet me.<|end|><|start|>assistant<|channel|>final<|message|> Hello!\n<|return|>",
        content=" Hello!\n", reasoning="They greet me.",
    ),
    Transcript(
        "harmony", _HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Oslo"}<|call|>',
        content="I look it up.", reasoning="Weather.", calls=(("get_weather", '{"city":"Oslo"}'),),
    ),
    Transcript(
        "harmony", _HARMONY, "<|start|>assistant",
        ' to=functions.get-weather.v2<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        calls=(("get-weather.v2", '{"city": "Oslo"}'),),
    ),
    Transcript(
        "harmony", _HARMONY, "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>",
        content="{}", reasoning="a\nb",
    ),
    Transcript(
        "gemma4", _GEMMA4, "<|turn>user\nhi<turn|>\n<|turn>model\n",
        '<|channel>thought\nWeather.\n<channel|>Wait.<|tool_call>call:get_weather{city:<|"|>Os{"lo<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_time{}<tool_call|><|tool_response>',
        content="Wait.", reasoning="Weather.",
        calls=(("get_weather", '{"city": "Os{\\"lo", "days": 3}'), ("get_time", "{}")),
    ),
    Transcript("gemma4", _GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>", "Hello <b>!<turn|>", content="Hello <b>!"),
    Transcript(
        "function_gemma", ("<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_of_turn>model\n", "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
        calls=(_OSLO,),
    ),
    Transcript(
        "gemma3", ("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>model\n",
        "I ask.\n```tool_code\nget_weather(city='Oslo', days=3)\n```",
        content="I ask.\n", calls=(("get_weather", '{"city": "Oslo", "days": 3}'),),
    ),
    Transcript("gemma3", ("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>model\n", "[get_weather(city=\"Oslo\")]", calls=(_OSLO,)),
    Transcript(
        "hermes", _CHATML, _CHATML_PROMPT,
        '<think>\nWeather?\n</think>\n\nI ask.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os}\\"lo"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": [1, {"b": 2}]}, "name": "other"}\n</tool_call>',
        content="I ask.", reasoning="Weather?",
        calls=(("get_weather", '{"city": "Os}\\"lo"}'), ("other", '{"a": [1, {"b": 2}]}')),
    ),
    Transcript("hermes", _CHATML, _CHATML_PROMPT + "<think>\n", "So.\n</think>\n\nYes.", content="Yes.", reasoning="So."),
    Transcript("hermes", _CHATML, _CHATML_PROMPT + "<think>\n\n</think>\n\n", "Yes. ", content="Yes. "),
    Transcript("hermes", ("[|assistant|]", "[|endofturn|]", "<think>", "</think>"), "[|assistant|]\n<think>\n", "x\n</think>\n\ny",
               content="y", reasoning="x"),
    Transcript(
        "qwen_xml", _CHATML, _CHATML_PROMPT + "<think>",
        "hm</think><tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</tool_call>",
        reasoning="hm", calls=(("get_weather", '{"city": "Oslo", "days": 3}'),),
    ),
    Transcript(
        "olmo3", _CHATML[:4], _CHATML_PROMPT,
        "Wait.<function_calls>\nget_weather(city=\"Oslo\", ok=true)\nget_time()\n</function_calls>", content="Wait.",
        calls=(("get_weather", '{"city": "Oslo", "ok": true}'), ("get_time", "{}")),
    ),
    Transcript("mistral", _MISTRAL, "[INST]hi[/INST]", "[THINK]So.[/THINK]Well [1].[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\"}"
               "[TOOL_CALLS]get_time[CALL_ID]abc123def[ARGS]{}", content="Well [1].", reasoning="So.",
               calls=(_OSLO, ("get_time", "{}"))),
    Transcript("mistral", _MISTRAL, "[INST]hi[/INST]", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}, '
               '{"name": "get_time", "arguments": {}}]', calls=(_OSLO, ("get_time", "{}"))),
    Transcript("llama4", _LLAMA, _LLAMA_PROMPT, '{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot|>', calls=(_OSLO,)),
    Transcript("llama4", _LLAMA, _LLAMA_PROMPT, '<|python_start|>[get_weather(city="Oslo"), get_time()]<|python_end|><|eot|>',
               calls=(_OSLO, ("get_time", "{}"))),
    Transcript("llama4", _LLAMA, _LLAMA_PROMPT, 'It is {"name": 1}.<|eot|>', content='It is {"name": 1}.'),
    Transcript(
        "command", _COMMAND, _COMMAND_PROMPT,
        '<|START_THINKING|>So.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Oslo"}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        reasoning="So.", calls=(_OSLO, ("get_time", "{}")),
    ),
    Transcript("command", _COMMAND, _COMMAND_PROMPT, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", content="Hello."),
)  # fmt: skip


PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # Qwen's tokens that are not special


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
