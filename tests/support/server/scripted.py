"""Servers whose model writes a script: the transcript of a family, or the answers of an agent that calls tools.

`python -m tests.support.server.scripted '{...}'` is a process with the agent; the argument has options of the server.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from jswa.errors import GenerationError
from jswa.grammar.compiler import Grammars
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from server.http.process import set_up_logging
from server.options import ServeConfig
from server.processes.supervisor import run
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving
from tests.support.text.transcripts import TRANSCRIPTS, Transcript, template_of, tokenizer_of

# The rendered prompt is that of the transcript; a template that names tools is one that can be shown some.
TEMPLATE = "{%- for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"
# Renders all parts of a history, as gpt-oss's template does: reasoning is `thinking`.
AGENT_TEMPLATE = (
    "{%- if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>"
    "{%- endif %}{%- for m in messages %}"
    "{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{%- if m.content %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- for c in m.tool_calls %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{%- endfor %}<|start|>assistant"
)
HARMONY = next(one.special for one in TRANSCRIPTS if one.family == "harmony")
_ENDS = ("<|call|>", "<|return|>")


@contextmanager
def scripted(
    one: Transcript, *, answers: bool = True, forms: bool = False, template: str = TEMPLATE, **options: Any
) -> Iterator[Client]:
    """Run a server whose model answers with a transcript, whatever it is asked.

    Args:
        answers: whether the server has the family's response template.
        forms: whether the engine compiles the forms of requests; its script is not held to them.
    """
    tokenizer = tokenizer_of(one.special)
    written = tokenizer.encode(one.text, add_special_tokens=False).tolist()
    special = {tokenizer.backend.token_to_id(text) for text in one.special}
    ends = written[-1] in special and written.count(written[-1]) == 1
    engine = writing_engine(tokenizer, lambda _: one.text, [written[-1]] if ends else ())
    if forms:
        vocabulary = max(tokenizer.vocab_size, engine.model.vocab_size)
        engine.grammars = Grammars(tokenizer, vocabulary, [tokenizer.vocab_size - 1])
    found = template_of(one.family, tokenizer) if answers else None
    with serving(engine, tokenizer=tokenizer, template=template, answers=found, **options) as client:
        yield client


@contextmanager
def agent(*, forms: bool = False, **options: Any) -> Iterator[Client]:
    """Run a server whose model is an agent; see `scripted` for `forms`."""
    tokenizer, template = tokenizer_of(HARMONY), template_of("harmony", tokenizer_of(HARMONY))
    engine = _agent_with_forms() if forms else _agent_engine()
    with serving(engine, tokenizer=tokenizer, template=AGENT_TEMPLATE, answers=template, **options) as client:
        yield client


def ask(one: Transcript, **more: Any) -> dict[str, Any]:
    """Return the body of a chat that renders to the transcript's prompt."""
    return {"messages": [{"role": "system", "content": one.prompt}], "tools": list(one.tools), **more}


def agent_answer(prompt: str) -> str:
    """Return what the agent writes behind a prompt.

    It writes as the template does. It calls the first tool that it is shown for each word of the user that has a
    capital, one after the other, and then repeats the results. It knows its calls from the prompt alone, and tells how
    many thoughts of its own are there.
    """
    start = "<|start|>assistant<|channel|>"
    tools = re.search(r"<\|start\|>developer<\|message\|>([\w.-]+) ", prompt)
    turn = prompt.rpartition("<|start|>user<|message|>")[2]
    cities = re.findall(r"\b[A-Z]\w+", turn.partition("<|end|>")[0])
    results = re.findall(r"<\|start\|>tool<\|message\|>(.*?)<\|end\|>", turn, re.DOTALL)
    called = re.findall(r'to=functions\.\S+<\|channel\|>commentary json<\|message\|>{"city": "(\w+)"}<\|call\|>', turn)
    thought = f"{start}analysis<|message|>".removeprefix("<|start|>assistant")
    if tools is None or not cities:
        return f"{thought}They greet me.<|end|>{start}final<|message|>Hello!<|return|>"
    if len(results) < len(cities) and called == cities[: len(results)]:
        arguments = json.dumps({"city": cities[len(results)]})
        call = f"<|start|>assistant to=functions.{tools[1]}<|channel|>commentary json<|message|>{arguments}<|call|>"
        return f"{thought}I look up {cities[len(results)]}.<|end|>{call}"
    known = turn.count("analysis<|message|>I look up")
    said = f"{', '.join(results)} ({len(called)} calls, {known} thoughts)"
    return f"{thought}I know all.<|end|>{start}final<|message|>{said}<|return|>"


def writing_engine(tokenizer: Tokenizer, write: Callable[[str], str], ends: Collection[int] = ()) -> FakeEngine:
    """Return an engine whose model writes a text behind a prompt, and then one of the end tokens."""
    end = tokenizer.vocab_size

    @cache
    def ids(prompt: str) -> Sequence[int]:
        return tuple(tokenizer.encode(write(prompt), add_special_tokens=False).tolist())

    def rule(prompt: list[int], position: int) -> int | GenerationError:
        written = ids(tokenizer.decode(prompt, skip_special_tokens=False))
        return written[position] if position < len(written) else end

    engine = FakeEngine(rule=rule, max_model_len=4096)
    engine.model.vocab_size = end + 1
    engine.model.eos_token_ids = (end, *ends)
    return engine


def _agent_engine() -> FakeEngine:
    tokenizer = tokenizer_of(HARMONY)
    ends = tokenizer.encode("".join(_ENDS), add_special_tokens=False).tolist()
    return writing_engine(tokenizer, agent_answer, ends)


def _agent_with_forms() -> FakeEngine:
    """Return an agent that compiles the forms of requests; its script is not held to them."""
    engine = _agent_engine()
    engine.grammars = Grammars(tokenizer_of(HARMONY), engine.model.vocab_size, engine.model.eos_token_ids)
    return engine


if __name__ == "__main__":
    served = Served(
        _agent_with_forms,
        tokenizer_of(HARMONY),
        ChatTemplate({"default": AGENT_TEMPLATE}, {}),
        template_of("harmony", tokenizer_of(HARMONY)),
    )
    config = ServeConfig(**{"served_model_name": ("agent",), "port": 0, **json.loads(sys.argv[1])})
    set_up_logging(config)
    sys.exit(run(served, config))
