"""GGUF vocabularies become tokenizers: ids, texts, special tokens, chat templates, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jswa.errors import CheckpointError
from jswa.gguf.tokenizer import tokenizer_files
from jswa.gguf.vocabulary.tokens import NORMAL, UNUSED
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from tests.support.text.gguf import BYTES, MERGES, byte_level, sentencepiece

WORDS = {"▁": -9.0, "a": -8.0, "b": -8.0, "▁a": -1.0, "ab": 0.0, "é": -8.0, "\n": -8.0}
BOS = len(BYTES) + len(MERGES)


def loaded(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer that jswa reads from the folder that the files make."""
    files = tokenizer_files(metadata)
    (folder / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(files.config), encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokens of a text without those around it."""
    found = (tokenizer.backend.id_to_token(one) for one in tokenizer.encode(text, add_special_tokens=False).tolist())
    return [one for one in found if one is not None]


def test_a_byte_level_vocabulary_splits_merges_and_keeps_ids(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(add_bos_token=True, padding_token_id=BOS + 1), tmp_path)
    text = "hello hello12<think><e>é\x00"
    found = tokenizer.encode(text).tolist()
    assert found[:4] == [BOS, BOS - 3, BOS - 1, BOS - 2], "<s>, hello, ' hello', 12"
    assert found[4:6] == [BOS + 2, BOS + 1], "tokens that users define, and control tokens, are matched whole"
    assert tokenizer.decode(found, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.decode(found) == text.replace("<e>", ""), "only control tokens are special"
    assert [tokenizer.token_id(f"{name}_token") for name in ("bos", "eos", "pad", "unk")] == [
        BOS,
        BOS + 1,
        BOS + 1,
        None,
    ]
    assert tokenizer.vocab_size == BOS + 3, "fillers of the embedding are no tokens"
    assert pieces(tokenizer, f"[PAD{BOS + 3}]")[0] == "["


def test_eos_may_follow_prompts(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(add_bos_token=True, add_eos_token=True), tmp_path)
    assert tokenizer.encode("1").tolist() == [BOS, BYTES.index("1"), BOS + 1]
    assert len(tokenizer.backend.encode("1", "1")) == 6


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        (byte_level(), False),
        (byte_level("llama-bpe"), True),
        (byte_level("tekken"), True),
        (byte_level("llama-bpe", add_bos_token=False), False),
        (byte_level("llama-bpe", bos_token_id=None), False),
        (sentencepiece(WORDS), True),
        (sentencepiece(WORDS, add_bos_token=False), False),
        (sentencepiece(WORDS, scores=None, model="gemma4", merges=["a b"], add_bos_token=True), False),
    ],
    ids=["gpt-2", "llama-bpe", "tekken", "said", "no id", "llama", "llama, said", "gemma4"],
)
def test_the_file_says_whether_prompts_begin_with_bos_or_its_kind_does(
    metadata: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    tokenizer = loaded(metadata, tmp_path)
    assert (tokenizer.encode("a").tolist()[0] == tokenizer.token_id("bos_token")) == begins
    assert tokenizer.special.add_bos is begins


def test_llama_puts_a_space_in_front_and_merges_by_score(tmp_path: Path) -> None:
    tokenizer = loaded(sentencepiece(WORDS, users=("<x>",)), tmp_path)
    assert pieces(tokenizer, "ab") == ["▁", "ab"], "the score of ab is above that of ▁a"
    assert pieces(tokenizer, "ac") == ["▁a", "<0x63>"]
    assert pieces(tokenizer, "<x>é €") == ["<x>", "▁", "é", "▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("ab é€\tab").tolist()) == "ab é€\tab"
    assert tokenizer.token_id("unk_token") == 0, "of its kind, as no key names it"


def test_listed_merges_come_before_scores(tmp_path: Path) -> None:
    assert pieces(loaded(sentencepiece(WORDS, merges=["▁ a", "a b"]), tmp_path), "ab") == ["▁a", "b"]


def test_gemma_keeps_spaces_and_gives_their_runs_the_first_merges(tmp_path: Path) -> None:
    runs = tuple(" " * count for count in (2, 3))
    metadata = sentencepiece(WORDS, users=(*runs, "\n\n"), add_space_prefix=False, scores=None)
    metadata["tokenizer.ggml.scores"] = [0.0] * 259 + list(WORDS.values()) + [-1000.0] * 3
    tokenizer = loaded(metadata, tmp_path)
    assert pieces(tokenizer, "ab") == ["ab"]
    assert pieces(tokenizer, " " * 6 + "a") == ["▁▁▁", "▁▁▁", "a"], "above ▁a, and the longest first"
    assert pieces(tokenizer, "\n\n\n") == ["\n\n", "\n"]
    assert pieces(tokenizer, "\t") == ["\t"], "the byte's id"
    assert tokenizer.encode("\t").tolist() == [1, 3 + 9]
    assert tokenizer.decode(tokenizer.encode("  ab \t  \n\n").tolist()) == "  ab \t  \n\n"


def test_phi_3_takes_the_spaces_after_special_tokens(tmp_path: Path) -> None:
    metadata = sentencepiece(WORDS, users=("<x>", "<|endoftext|>"), eos_token_id=2) | {"general.architecture": "phi3"}
    tokenizer = loaded(metadata, tmp_path)
    assert pieces(tokenizer, "<x>  ab</s>  ab") == ["<x>", "▁", "ab", "</s>", "▁", "ab"], "named or not"
    assert pieces(tokenizer, "<s> ab<|endoftext|> ab") == ["<s>", "▁", "▁", "ab", "<|endoftext|>", "▁", "▁", "ab"]
    assert tokenizer.token_id("eos_token") == 2


def test_a_filler_that_a_key_names_is_a_token(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(padding_token_id=BOS + 3), tmp_path)
    assert tokenizer.encode(f"[PAD{BOS + 3}]").tolist() == [BOS + 3]


def test_unused_tokens_with_a_text_are_tokens(tmp_path: Path) -> None:
    kinds = [NORMAL] * BOS + [UNUSED] * 5
    kinds[BYTES.index("h")] = UNUSED
    tokenizer = loaded(byte_level(token_type=kinds), tmp_path)
    assert tokenizer.encode("hello").tolist() == [BOS - 3]
    assert tokenizer.token_id("bos_token") == BOS


def test_chat_templates_are_read_by_name(tmp_path: Path) -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "{{ bos_token }}A", "tokenizer.chat_template.tool_use": "B"}
    loaded(metadata, tmp_path)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.sources == {"default": "{{ bos_token }}A", "tool_use": "B"}
    assert template.render([{"role": "user", "content": "x"}]) == "<s>A"
    loaded(byte_level() | {"tokenizer.chat_template": "C"}, tmp_path)
    one = ChatTemplate.load(tmp_path)
    assert one is not None
    assert one.sources == {"default": "C"}
    loaded(byte_level(), tmp_path)
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model = None: must be gpt2, llama or gemma4"),
        (byte_level(model="bert"), r"tokenizer\.ggml\.model = 'bert': must be"),
        (byte_level(model=3), r"tokenizer\.ggml\.model = 3: must be a text"),
        (byte_level("falcon"), r"tokenizer\.ggml\.pre = 'falcon': must be one of gemma4, afmoe, "),
        (byte_level(pre=None), r"tokenizer\.ggml\.pre = None: must be one of"),
        (
            byte_level(add_space_prefix=True),
            r"add_space_prefix = True: must be false if tokenizer\.ggml\.model is gpt2",
        ),
        (byte_level(add_space_prefix=0), r"add_space_prefix = 0: must be true or false"),
        (byte_level(tokens=None), r"tokenizer\.ggml\.tokens = None: must be a list"),
        (byte_level(tokens=[]), r"tokenizer\.ggml\.tokens = \[\]: must have at least one"),
        (byte_level(tokens=["a", 1]), r"tokenizer\.ggml\.tokens\[1\] = 1: must be a text"),
        (byte_level(tokens=["a"]), r"tokenizer\.ggml\.token_type = .*: has 267 values: must have at most 1$"),
        (byte_level(token_type=[1]), r"token_type = \[1\]: has 1 values: must have one for each of the 267 tokens"),
        (byte_level(token_type=[7] * 267), r"token_type\[0\] = 7: must be a whole number from 0 to 6"),
        (byte_level(token_type=[True] * 267), r"token_type\[0\] = True: must be a number"),
        (byte_level(tokens=["a"] * 267), r"tokens\[1\] = 'a': must differ from token 0"),
        (byte_level(tokens=["\ud800"] * 267), r"tokens = .*: must be valid Unicode"),
        (
            byte_level(bos_token_id=267),
            r"tokenizer\.ggml\.bos_token_id = 267: must be the id of a token, from 0 to 266",
        ),
        (byte_level(eos_token_id=-1), r"eos_token_id = -1: must be the id"),
        (byte_level(eos_token_id=True), r"eos_token_id = True: must be the id"),
        (
            byte_level(bos_token_id=None, add_bos_token=True),
            r"add_bos_token = True: needs tokenizer\.ggml\.bos_token_id",
        ),
        (
            sentencepiece(WORDS, remove_extra_whitespaces=True),
            r"remove_extra_whitespaces = True: must be absent or false",
        ),
        (
            sentencepiece(WORDS, precompiled_charsmap=[0, 1]),
            r"precompiled_charsmap = \[0, 1\]: must be absent or false",
        ),
        (
            byte_level(
                tokens=[*BYTES, "\x01" * 2**23 + "x", "\x02" * 2**22],
                token_type=None,
                merges=[],
                bos_token_id=None,
                eos_token_id=None,
            ),
            r"tokenizer\.json of 7550\d{4} bytes, at most 67108864 fit",
        ),
        (byte_level() | {"tokenizer.chat_template": 1}, r"tokenizer\.chat_template = 1: must be a text"),
        (byte_level() | {"tokenizer.chat_template.x": ["a"]}, r"tokenizer\.chat_template\.x = \['a'\]: must be a text"),
        (sentencepiece(WORDS, token_type=[1] * 266), r"unknown_token_id = None: must be the id of a token"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_is_malformed_or_unknown_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(metadata)


KEYS = sorted({*byte_level(), *sentencepiece(WORDS), "general.architecture", "tokenizer.chat_template.x"} | {
    f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_eos_token", "add_space_prefix", "unknown_token_id")
})  # fmt: skip
TEXT = st.sampled_from(
    ["", "a", "ab", "a b", "▁", "  ", "<0x09>", "[PAD1]", "<unk>", "gpt2", "gemma4", "llama", "\t", "b", "é"]
)
VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.floats(), TEXT, st.text(max_size=3),
    st.lists(TEXT, max_size=6), st.lists(st.integers(0, 7), max_size=6), st.lists(st.floats(), max_size=6),
)  # fmt: skip


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """Metadata of a small vocabulary with other values, or with other elements in its lists."""
    metadata = dict(draw(st.sampled_from([byte_level(), byte_level("qwen2"), sentencepiece(WORDS), sentencepiece({})])))
    metadata |= draw(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3))
    lists = [key for key, value in metadata.items() if isinstance(value, list) and value]
    for key in draw(st.lists(st.sampled_from(lists), max_size=4)) if lists else ():
        at = draw(st.integers(0, len(metadata[key]) - 1))
        metadata[key] = [*metadata[key][:at], draw(VALUE), *metadata[key][at + 1 :]]
    return metadata


@given(hostile())
@settings(deadline=None)
def test_any_metadata_is_refused_or_makes_a_tokenizer(metadata: dict[str, Any]) -> None:
    try:
        files, message = tokenizer_files(metadata), ""
    except CheckpointError as error:
        files, message = None, str(error)
    assert len(message) < 1_000
    if files is None:
        return
    tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer)
    ids = tokenizer.encode("ab  é\t<unk>").ids
    tokenizer.decode(ids)
    assert all(0 <= found < len(metadata["tokenizer.ggml.tokens"]) for found in ids)
