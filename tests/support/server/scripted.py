"""A server whose model writes the transcripts of a family, and that can answer chats of any form."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jswa.errors import GenerationError
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving
from tests.support.text.transcripts import Transcript, template_of, tokenizer_of

# The rendered prompt is that of the transcript; a template that names tools is one that can be shown some.
TEMPLATE = "{%- for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"


@contextmanager
def scripted(one: Transcript, *, answers: bool = True, template: str = TEMPLATE, **options: Any) -> Iterator[Client]:
    """Run a server whose model answers with a transcript, whatever it is asked.

    Args:
        answers: whether the server has the family's response template.
    """
    tokenizer = tokenizer_of(one.special)
    written = tokenizer.encode(one.text, add_special_tokens=False).tolist()
    end = tokenizer.vocab_size

    def rule(prompt: list[int], position: int) -> int | GenerationError:
        return written[position] if position < len(written) else end

    engine = FakeEngine(rule=rule, max_model_len=4096)
    engine.model.vocab_size = end + 1
    special = {tokenizer.backend.token_to_id(text) for text in one.special}
    ends = written[-1] in special and written.count(written[-1]) == 1
    engine.model.eos_token_ids = (end, written[-1]) if ends else (end,)
    found = template_of(one.family, tokenizer) if answers else None
    with serving(engine, tokenizer=tokenizer, template=template, answers=found, **options) as client:
        yield client


def ask(one: Transcript, **more: Any) -> dict[str, Any]:
    """Return the body of a chat that renders to the transcript's prompt."""
    return {"messages": [{"role": "system", "content": one.prompt}], "tools": list(one.tools), **more}
