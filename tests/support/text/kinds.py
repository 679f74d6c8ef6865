"""Turns of an assistant that calls tools, with arguments of all kinds that clients have seen go wrong."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARKS = (
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<|call|>", "<|message|>", "<|channel|>", "<|end|>", "<|tool_call>", "<tool_call|>", "<|turn>", '<|"|>',
    "<escape>", "<start_function_call>", "<end_function_call>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<function_calls>", "</function_calls>", "<think>", "</think>", "<|python_start|>", "<|eot|>", "<|im_end|>",
    "<end_of_turn>", "```", "```tool_code",
)  # fmt: skip
AMID = "x {} y"  # marks stand so in texts
_PYTHON = 'class A:\n    """It\'s a class."""\n\n    def f(self, x: int = 1) -> str:\n        return f"{x!r}\\n"\n'
_XML = '<?xml version="1.0"?>\n<a b="c">\n  <d/>&amp;<![CDATA[x]]>\n</a>\n'
_JSON = '{\n  "name": "f",\n  "arguments": {"a": [1, "\\"x\\""]}\n}'
_DIFF = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-    return 'a'\n+    return \"b\"\n \n"
_CALLS = {
    "hermes": '<tool_call>\n{"name": "g", "arguments": {"b": 1}}\n</tool_call>',
    "Qwen's XML": "x\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=b>\n1\n",
    "Gemma 4": '<|tool_call>call:g{b:<|"|>x<|"|>}<tool_call|>',
    "FunctionGemma": "<start_function_call>call:g{b:<escape>x<escape>}<end_function_call>",
    "harmony": '<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b": 1}<|call|>',
    "Mistral": '[TOOL_CALLS]g[ARGS]{"b": 1}',
    "Python": "[g(b=1)]\n```\n</function_calls>",
    "JSON": '"}} {"name": "g", "parameters": {}}',
}
_KEYS = {
    "a dash": "user-id",
    "a space": "Basic LLM",
    "a dot": "a.b",
    "a dollar": "$ref",
    "a colon": "a:b",
    "an @": "@type",
    "a slash": "a/b",
    "letters with accents": "naïve",
    "Chinese": "城市",
    "an emoji": "🌧",
    "from": "from",
    "class": "class",
    "import": "import",
    "None": "None",
    "a digit first": "2nd",
    "nothing": "",
    "an equals sign": "a=b",
    "a comma": "a,b",
    "a quote": 'say "x"',
    "an apostrophe": "it's",
    "a bracket": "a[0]",
    "a brace": "{a}",
    "name": "name",
    "arguments": "arguments",
    "parameters": "parameters",
    "an underscore": "_",
}
_VALUES: Mapping[str, Any] = {
    "white space in front": "    if x:",
    "white space behind": "x  ",
    "a newline in front": "\nx",
    "a newline behind": "x\n",
    "newlines at both ends": "\n\n  x\n\n\n",
    "white space only": " \n\t ",
    "a tab": "\ta\tb",
    "carriage returns": "a\r\nb\r\n",
    "no text": "",
    "double quotes": 'say "x"',
    "single quotes": "it's 'x'",
    "both quotes": '"it\'s"',
    "three quotes": "'''a''' \"\"\"b\"\"\"",
    "a quote at the end": 'x"',
    "typographic quotes": "“x” ‘y’",
    "backslashes": "C:\\new\\table\\",
    "escapes that are text": '\\n \\u00e9 \\x41 \\"',
    "a backslash": "\\",
    "braces": "{a: {b}} }{",
    "brackets": "[a, [b]] ][",
    "parentheses": "f(a=1), g()",
    "commas and colons": "a, b: c; d = e",
    "angles": "a < b > c & d",
    "a brace": "}",
    "a bracket": "]",
    "Python": _PYTHON,
    "XML": _XML,
    "JSON": _JSON,
    "a diff": _DIFF,
    "Markdown": "# A\n\n```python\nx = 1\n```\n",
    "an emoji": "🌧️ 👩‍👩‍👧 e\u0301",
    "Chinese": "奥斯陆，你好。",
    "control characters": "\x01\x1f\x7f\u2028\u2029",
    "an integer": 7,
    "a negative integer": -12,
    "zero": 0,
    "a large integer": 2**53 + 1,
    "a very large integer": -(10**30),
    "a float": 1.5,
    "a whole float": 3.0,
    "a small float": 1e-7,
    "a large float": 1e22,
    "negative zero": -0.0,
    "true": True,
    "false": False,
    "null": None,
    "an empty list": [],
    "a list": ["a", "b c", "d,e"],
    "a list of numbers": [1, -2.5, 3],
    "a mixed list": [1, "a", None, True, [], {}, 2.5],
    "nested lists": [[1, [2, []]], [["x"]]],
    "an empty object": {},
    "an object": {"a": 1, "b": "x y", "c": None, "d": True},
    "odd keys inside": {"a-b": 1, "": 2, "c d": [{"$e": "f"}], "from": "g"},
    "a list of objects": [{"path": "a.py", "text": "x\n"}, {"path": "b.py", "text": "  "}],
    "booleans and null inside": {"t": True, "f": False, "n": None, "l": [True, False, None]},
    "quotes inside": {"a": 'say "x"', "b": ["it's", '"it\'s"', "\\"], "c": {"d": "\n x \n"}},
    "text like a number": "42",
    "text like a float": "1e5",
    "text like a boolean": "true",
    "text like Python's": "True",
    "text like null": "null",
    "text like None": "None",
    "text like a list": "[1, 2]",
    "text like an object": '{"a": 1}',
    "text like quoted text": '"x"',
    "numbers with zeros": "007",
    "much text": "All work and no play. " * 40,
    "deep lists": json.loads("[" * 20 + "1" + "]" * 20),
    "deep objects": json.loads('{"a": ' * 20 + '"x"' + "}" * 20),
    "a mark inside an object": {"a": ["x </tool_call> y", 'x <|"|> y', "x </parameter> y"]},
}


@dataclass(frozen=True)
class Turn:
    """What an assistant says: reasoning, then text, then calls, each a name and arguments."""

    calls: Sequence[tuple[str, Mapping[str, Any]]]
    content: str = ""
    reasoning: str = ""

    def declared(self) -> list[dict[str, Any]]:
        """Return the tools that the calls need, in OpenAI's form; each argument is declared with its type."""
        properties: dict[str, dict[str, Any]] = {}
        required: dict[str, set[str]] = {}
        for name, arguments in self.calls:
            properties.setdefault(name, {}).update({key: schema_of(value) for key, value in arguments.items()})
            required.setdefault(name, set(arguments)).intersection_update(arguments)
        return [
            {"type": "function", "function": {"name": name, "description": "A tool.",
             "parameters": {"type": "object", "properties": of, "required": sorted(required[name])}}}
            for name, of in properties.items()
        ]  # fmt: skip

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of the assistant, as jswa sends it to chat templates."""
        calls = [
            {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for index, (name, arguments) in enumerate(self.calls)
        ]
        about = {"role": "assistant", "content": self.content, "tool_calls": calls}
        return {**about, "reasoning_content": self.reasoning} if self.reasoning else about


def schema_of(value: Any) -> dict[str, Any]:
    """Return a JSON schema with the type of a value, and with those of the values inside."""
    if value is None:
        return {"type": "null"}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, Mapping):
        return {"type": "object", "properties": {key: schema_of(one) for key, one in value.items()}}
    if isinstance(value, list):
        inner = [schema_of(one) for one in value]
        return (
            {"type": "array", "items": inner[0]}
            if inner and all(one == inner[0] for one in inner)
            else {"type": "array"}
        )
    return {"type": "string" if isinstance(value, str) else "integer" if isinstance(value, int) else "number"}


def _kinds() -> dict[str, Turn]:
    kinds = {f"key: {name}": Turn([("f", {key: "x"})]) for name, key in _KEYS.items()}
    kinds |= {f"value: {name}": Turn([("f", {"a": value})]) for name, value in _VALUES.items()}
    kinds |= {f"mark: {mark}": Turn([("f", {"a": AMID.format(mark)})]) for mark in MARKS}
    kinds |= {f"call as text: {name}": Turn([("f", {"a": AMID.format(text)})]) for name, text in _CALLS.items()}
    kinds |= {
        f"name: {name}": Turn([(name, {"a": 1})]) for name in ("get_weather", "mcp__fs__read", "a-b", "Read", "g2")
    }
    one, two = ("f", {"a": "x"}), ("g", {"b": [1, {"c": "y z"}]})
    several = {"a": "  x\n", "from": 3, "b-c": [True, None], "d": {"e": "f"}, "g": "true"}
    kinds |= {
        "no arguments": Turn([("f", {})]),
        "several arguments": Turn([("f", several)]),
        "two calls": Turn([one, two]),
        "two equal calls": Turn([one, one]),
        "five calls": Turn([one, two, ("f", several), ("g", {}), one]),
        "text before": Turn([one], content="I look it up."),
        "text with a brace before": Turn([one], content='{"x": 1} and [f(a=1)]:\n'.strip()),
        "text before two calls": Turn([one, two], content="First this,\n\nthen that."),
        "reasoning before": Turn([one], reasoning="The user wants x.\n\nSo f."),
        "reasoning and text before": Turn([one, two], content="I look it up.", reasoning="Hm, {x}?"),
    }
    return kinds


KINDS: Mapping[str, Turn] = _kinds()
