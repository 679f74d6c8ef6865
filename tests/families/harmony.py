"""Random token streams of gpt-oss, read by jswa and by openai-harmony: `python -m tests.families.harmony [--seed N]`.

Prints how many are read alike, and examples of the others. Fails if a stream is read otherwise that openai-harmony does
not refuse. A message without its end may be: there it goes on over the headers that follow, and here they count. So may
the name of an unknown channel, which is content here, since a word that is none of harmony's own must not be lost.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import compile_template, shipped
from tests.families.material import FOLDER, ROOT, tokenizer
from tests.support.text.transcripts import calls_of, pieces_of, read, text_of

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "a-b", "python")]
RECIPIENTS = ("functions.get_weather", "functions.a-b", "python", "browser.search", "functions.x.y", "get_weather")
TYPES = ("", "", "", " <|constrain|>json", "<|constrain|>json", " json", " code", " <|constrain|>JSON ")
CHANNELS = (*("analysis", "commentary", "final") * 6, "comment")
TEXTS = (
    "", "Hi", " hi \n", "{}", '{"city": "Oslo"}', '{"a": [1, {"b": "x"}]}', "a\nb", "to=functions.f", "analysis",
    "<|chan", "é漢字", '{"a": ', "<b>x</b>", "functions.f<|", "```json\n{}\n```",
)  # fmt: skip
ENDS = ("<|end|>", "<|end|>", "<|end|>", "<|call|>", "<|return|>")


def header(draw: random.Random, *, first: bool) -> str:
    """Return the header of a message, behind `<|start|>assistant` if it is the first."""
    role = "" if first else "<|start|>assistant"
    to = f" to={draw.choice(RECIPIENTS)}"
    channel = f"<|channel|>{draw.choice(CHANNELS)}"
    kind = draw.choice(TYPES)
    if not first and draw.random() < 0.03:
        return f"<|start|>{draw.choice(('user', 'functions.get_weather to=assistant', 'tool'))}{channel}"
    forms = (
        *[role + to + channel + kind] * 4, *[role + channel + to + kind] * 6, *[role + channel + kind] * 10,
        role + to, role + to + kind, role, role + to + channel + to + kind,
    )  # fmt: skip
    return draw.choice(forms)


def stream(draw: random.Random) -> str:
    """Return the text of some messages."""
    count = draw.randint(1, 4)
    text = ""
    for number in range(count):
        end = "" if draw.random() < 0.02 and number < count - 1 else draw.choice(ENDS)
        text += header(draw, first=number == 0) + "<|message|>" + draw.choice(TEXTS) + end
    return text


def reference(streams: Sequence[Sequence[int]]) -> list[Any]:
    """Return what openai-harmony reads: a list of messages, or its error as a string."""
    python = ROOT / ".venv-families" / "bin" / "python"
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "families" / "harmony_reference.py")],
        input="".join(json.dumps(ids) + "\n" for ids in streams),
        env={**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(FOLDER / "vocabulary")},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def meant(messages: Sequence[tuple[str, str | None, str | None, str]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls of openai-harmony's messages.

    A type alone (`final json`) is a recipient there, since `to=` may be missing; and a message of another role that
    the model invents is content here.
    """
    parts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls = []
    for role, channel, recipient, text in messages:
        if recipient and role == "assistant" and not re.fullmatch(r"(?:<\|constrain\|>)?(?:json|JSON|code)", recipient):
            calls.append((recipient.removeprefix("functions."), text.strip() or "{}"))
        else:
            parts["reasoning" if channel == "analysis" and role == "assistant" else "content"].append(text)
    return "".join(parts["reasoning"]), "".join(parts["content"]), calls


def main() -> int:
    """Compare; return 1 if streams are read otherwise without a reason."""
    options = argparse.ArgumentParser()
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=5000)
    chosen = options.parse_args()
    draw = random.Random(chosen.seed)
    gpt_oss = tokenizer("gptoss")
    template = compile_template(shipped()["harmony"], gpt_oss)
    streams = []
    for _ in range(chosen.count):
        ids = gpt_oss.encode(stream(draw), add_special_tokens=False).tolist()
        streams.append(ids[: draw.randint(1, len(ids))] if draw.random() < 0.2 else ids)
    found, examples = Counter[str](), dict[str, list[str]]()
    for ids, messages in zip(streams, reference(streams), strict=True):
        parser = AnswerParser(template, template.prefix("<|start|>assistant"), TOOLS)
        events = read(parser, list(pieces_of(gpt_oss, template, ids)))
        said = [text_of(events, kind).replace("\n", "") for kind in ("reasoning", "content")]
        calls = [(name, text.strip()) for name, text in calls_of(events)]
        text = gpt_oss.decode(ids, skip_special_tokens=False)
        label = _label(text, messages, (*said, calls))
        found[label] += 1
        if label != "alike":
            examples.setdefault(label, []).append(f"{text!r}\n    jswa: {(*said, calls)}\n    harmony: {messages}")
    for label, count in found.most_common():
        print(f"{count:6} {label}")
        print("".join(f"  {one}\n" for one in sorted(examples.get(label, []), key=len)[:12]), end="")
    return int("OTHERWISE" in found)


def _label(text: str, messages: Any, got: tuple[Any, ...]) -> str:
    if isinstance(messages, str):
        return "openai-harmony refuses: " + messages.partition(":")[0]
    if any(re.search(r"<\|(?:start|channel)\|>", one[3]) for one in messages):
        return "a message without its end goes on in openai-harmony"
    reasoning, content, calls = meant(messages)
    if (reasoning.replace("\n", ""), content.replace("\n", ""), calls) == got:
        return "alike"
    strange = re.search(r"<\|channel\|>(?!(?:analysis|commentary|final)\b)", text)
    return "the name of an unknown channel is content" if strange else "OTHERWISE"


if __name__ == "__main__":
    sys.exit(main())
