"""Forms that have the text of a special token."""

import random
from typing import Any

import pytest

from jswa.grammar.compiler import Grammars
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import follow
from tests.support.text.transcripts import tokenizer_of


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"enum": ["</t>", "a</t>b"]}},
        {"json": {"type": "object", "properties": {'<"|>': {"const": 1}}, "required": ['<"|>']}},
        {"json": {"enum": ["\x7f</t>\x85"]}},
        {"choice": ["</t>"]},
        {"regex": "(</t>)+"},
        {"grammar": 'start: "</t>" "x"'},
    ],
    ids=str,
)
def test_the_text_of_a_special_token_can_be_forced(spec: dict[str, Any]) -> None:
    """As text: the token itself is none in a grammar."""
    tokenizer = tokenizer_of(("</t>", '<"|>', "<|end|>"))
    special = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [special[-1]], special[:2])
    grammar = grammars.compile(StructuredOutputsParams(**spec))
    for seed in range(4):
        ids = follow(grammar.matcher(), tokenizer, random.Random(seed), most=80)
        assert not set(special) & set(ids)
        assert ids
