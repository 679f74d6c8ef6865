"""Assembled text: what a tokenizer decodes, with and without delimiters."""

import re
from pathlib import Path

import numpy as np
import pytest

from jswa.plan import TokenEvent
from jswa.text.assembler import MARK, Assembler
from jswa.text.guard import GUARD, encode_guarded, guard
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams
from tests.support.checkpoints.text_folders import FAMILIES

TEXT = "  The cat sat, naïve 漢字 🙂 12\n\nend"


def assembled(tokenizer: Tokenizer, ids: list[int], delimiters: dict[int, str]) -> str:
    """Return the text of all tokens."""
    added = tokenizer.backend.get_added_tokens_decoder()
    hidden = {token for token, one in added.items() if one.special}
    none = np.zeros(0, np.int32)
    made = Assembler(tokenizer, none, SamplingParams(), StopTable(()), delimiters=delimiters, hidden=hidden)
    pieces = [
        made.push(TokenEvent("", token, "length" if at == len(ids) - 1 else None)) for at, token in enumerate(ids)
    ]
    assert made.tokens == len(ids)
    return "".join(pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_delimiters_are_marked_and_nothing_else_changes(family: str, tmp_path: Path) -> None:
    """Between the marked tokens stands the text that is decoded without them; other special tokens are hidden."""
    tokenizer = Tokenizer.load(FAMILIES[family](tmp_path))
    assert tokenizer is not None
    special = {token: one.content for token, one in tokenizer.backend.get_added_tokens_decoder().items() if one.special}
    (other, _), *_, (first, text) = special.items()
    words = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    ids = [*words, first, *words, other, *words[:3], first, first]
    found = assembled(tokenizer, ids, {first: text})
    assert found.count(MARK + text) == 3
    assert re.sub(MARK + re.escape(text), "", found) == assembled(tokenizer, ids, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_cut_character_is_shown(family: str, tmp_path: Path) -> None:
    """Whatever token is the last, the text is that of all tokens; bytes that are no character are not lost."""
    tokenizer = Tokenizer.load(FAMILIES[family](tmp_path))
    assert tokenizer is not None
    ids = tokenizer.encode("a" + TEXT, add_special_tokens=False).tolist()
    for end in range(1, len(ids) + 1):
        found, whole = assembled(tokenizer, ids[:end], {}), tokenizer.decode(ids[:end])
        assert found == whole or found[-1] == whole[-1] == "�"


@pytest.mark.parametrize("family", FAMILIES)
def test_guarded_special_tokens_are_ordinary_tokens(family: str, tmp_path: Path) -> None:
    """The text stays what it was; only messages of users and tools are guarded."""
    tokenizer = Tokenizer.load(FAMILIES[family](tmp_path))
    assert tokenizer is not None
    special = {token: one.content for token, one in tokenizer.backend.get_added_tokens_decoder().items() if one.special}
    text = "a" + "b".join(special.values()) + "c"
    for role in ("user", "tool", "assistant", "system"):
        (message,) = guard([{"role": role, "content": [{"type": "text", "text": text}]}], tokenizer)
        shown = message["content"][0]["text"]
        assert shown.replace(GUARD, "") == text
        ids = encode_guarded(shown, tokenizer, add_special_tokens=False).tolist()
        assert (not set(ids) & special.keys()) == (role in ("user", "tool"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_of_an_image_is_guarded_in_all_messages(family: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(FAMILIES[family](tmp_path))
    assert tokenizer is not None
    image, *others = (one.content for one in tokenizer.backend.get_added_tokens_decoder().values() if one.special)
    for role in ("user", "tool", "assistant", "system"):
        (message,) = guard([{"role": role, "content": f"a{image}{image}b", "x": others}], tokenizer, image)
        assert message["content"].count(GUARD) == 2
        assert message["content"].replace(GUARD, "") == f"a{image}{image}b"
        assert (message["x"] == others) == (role in ("assistant", "system") or not others)
