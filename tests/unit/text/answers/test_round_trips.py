"""What a family's chat template writes is read back: calls with arguments of all kinds."""

import pytest

from jswa.text.answers.template import compile_template, shipped
from tests.support.text.chat_templates import FAMILIES
from tests.support.text.kinds import KINDS
from tests.support.text.lost import OURS
from tests.support.text.round_trip import read_back, write


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_a_template_writes_is_read_back(name: str) -> None:
    """All kinds are, but those that the template cannot write, which docs/answers.md names."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    answers = compile_template(shipped()[family.reader], tokenizer)
    lost = {}
    for kind, turn in KINDS.items():
        written = write(family.template, turn)
        for tokens in {False, kind.startswith(("mark", "call"))}:
            if wrong := read_back(answers, tokenizer, turn, written, tokens=tokens):
                lost[kind] = f"{written.text!r} is read as {wrong}"
    known = OURS.get(name, frozenset())
    assert {kind: why for kind, why in lost.items() if kind not in known} == {}
    assert known <= lost.keys()
