"""Tokenizers in the formats of released families: the same ids and texts as transformers' AutoTokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jswa.errors import CheckpointError, InvalidPrompt
from jswa.text.detokenizer import StreamDecoder, decode_behind
from jswa.text.special_tokens import SpecialTokens
from jswa.text.tokenizer import Tokenizer
from tests.support.checkpoints.text_folders import FAMILIES, reference_tokenizer, special, write

TEXTS = [
    "the cat sat on the mat", "  two  spaces ", "naïve café 漢字 😀 Zoë", "a\n\nb\n\n\nc\td", "12345 and 6,789",
    "x", "",
    "<s>the</s> cat<|eot_id|> <end_of_turn>\n<bos>dog <|END_OF_TURN_TOKEN|>, <think>[TOOL_CALLS] in<|return|>",
]  # fmt: skip


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder that has one."""
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Encoding and decoding, with and without special tokens. Special tokens have the same names in both."""
    folder = FAMILIES[family](tmp_path)
    ours, reference = load(folder), reference_tokenizer(folder)
    made_up = {"gemma3": {"mask_token"}, "llama3": {"pad_token"}}.get(family, set())  # names that transformers adds
    assert ours.special.named == {k: v for k, v in reference.special_tokens_map.items() if k not in made_up}
    for name, text in ours.special.named.items():
        assert ours.token_id(name) == reference.convert_tokens_to_ids(text)
    for text in TEXTS:
        for bare in (False, True):
            ids = ours.encode(text, add_special_tokens=not bare).tolist()
            assert ids == reference(text, add_special_tokens=not bare).input_ids, text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_is_decoded_at_its_end_is_that_of_its_pieces(family: str, tmp_path: Path) -> None:
    """For tokens at random behind a prompt, which no tokenizer would have made of a text."""
    ours, random = load(FAMILIES[family](tmp_path)), np.random.default_rng(3)
    for _ in range(100):
        prompt, ids = (random.integers(0, ours.vocab_size, random.integers(1, 30)).astype(np.int32) for _ in range(2))
        stream = StreamDecoder(ours, prompt, skip_special_tokens=True)
        pieces = [stream.push(token) for token in ids.tolist()]
        whole = decode_behind(ours, prompt, ids.tolist(), skip_special_tokens=True)
        assert whole == "".join(pieces) + stream.finish()


@pytest.mark.parametrize(
    ("family", "bos"),
    [("gemma3", "<bos>"), ("llama3", "<|begin_of_text|>"), ("mistral", "<s>"), ("command_r", "<BOS_TOKEN>")],
)
def test_prompts_begin_with_bos_if_the_post_processor_adds_it(family: str, bos: str, tmp_path: Path) -> None:
    """BOS occurs nowhere else."""
    ours = load(FAMILIES[family](tmp_path))
    ids = ours.encode("the cat").tolist()
    assert ours.backend.id_to_token(ids[0]) == bos
    assert ids[1:] == ours.encode("the cat", add_special_tokens=False).tolist()


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_only_the_post_processor_decides_about_bos(
    asked: bool | None, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers 5, `add_bos_token` has no effect without a post-processor; a warning is logged."""
    folder = FAMILIES["mistral"](tmp_path)
    table = json.loads((folder / "tokenizer.json").read_text())
    write(folder, {"tokenizer.json": {**table, "post_processor": None}})
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    write(folder, {"tokenizer_config.json": config if asked is None else {**config, "add_bos_token": asked}})
    with caplog.at_level(logging.WARNING, "jswa"):
        ours = load(folder)
    ids = ours.encode("the cat").tolist()
    assert ids == reference_tokenizer(folder)("the cat").input_ids
    assert ours.token_id("bos_token") not in ids
    assert [record.name for record in caplog.records] == (["jswa.text.tokenizer"] if asked else [])


def test_prompts_are_never_truncated_or_padded(tmp_path: Path) -> None:
    """This llama3's tokenizer.json truncates and pads to 24 tokens, which is meant for training."""
    ours = load(FAMILIES["llama3"](tmp_path))
    assert len(ours.encode("the cat " * 40)) > 60
    assert len(ours.encode("x")) < 5


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    """command_r's <|END_OF_TURN_TOKEN|> becomes one special token with the id in the config."""
    ours = load(FAMILIES["command_r"](tmp_path))
    end = ours.token_id("eos_token")
    assert end is not None
    assert ours.encode("cat<|END_OF_TURN_TOKEN|>", add_special_tokens=False).tolist()[-1] == end
    assert ours.decode([end]) == ""
    assert ours.decode([end], skip_special_tokens=False) == "<|END_OF_TURN_TOKEN|>"
    assert end in ours.special.added


def test_an_id_that_would_leave_a_gap_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A vocabulary has no gaps: the token gets the next id, as in transformers, and a warning names it."""
    folder = FAMILIES["gpt_oss"](tmp_path)
    write(folder, {"tokenizer_config.json": {"added_tokens_decoder": {"5000": special("<far>")}}})
    with caplog.at_level(logging.WARNING, "jswa"):
        ours = load(folder)
    assert ours.encode("<far>").tolist() == [ours.vocab_size - 1]
    assert "5000" in caplog.text
    assert "<far>" in caplog.text


@pytest.mark.parametrize("value", ["</s>", {"__type": "AddedToken", **special("</s>")}, special("</s>"), None])
def test_special_tokens_may_be_strings_or_objects_or_null(value: Any, tmp_path: Path) -> None:
    """transformers refuses an object without `__type` here; jswa accepts it."""
    folder = FAMILIES["mistral"](tmp_path)
    (folder / "special_tokens_map.json").unlink()
    write(folder, {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast", "eos_token": value}})
    ours = load(folder)
    assert ours.token_id("eos_token") == (None if value is None else 2)
    if value != special("</s>"):
        assert ours.special.named.get("eos_token") == reference_tokenizer(folder).eos_token


def test_special_tokens_map_overrides_a_config_without_added_tokens(tmp_path: Path) -> None:
    """special_tokens_map.json is read only if tokenizer_config.json has no `added_tokens_decoder`."""
    write(tmp_path, {"special_tokens_map.json": {"eos_token": "</s>"}, "tokenizer_config.json": {"eos_token": "x"}})
    assert SpecialTokens.load(tmp_path).named == {"eos_token": "</s>"}
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "x", "added_tokens_decoder": {}}})
    assert SpecialTokens.load(tmp_path).named == {"eos_token": "x"}


def test_ids_beyond_the_tokenizers_vocabulary_have_no_text(tmp_path: Path) -> None:
    """A model may have padded rows for them: no crash if such an id is alone, inside a text, or ends a prompt."""
    ours = load(FAMILIES["gemma3"](tmp_path))
    padded, cat = ours.vocab_size + 7, ours.encode("cat", add_special_tokens=False).tolist()
    assert ours.decode([padded]) == ""
    assert ours.decode([*cat, padded, *cat]) == "catcat"
    stream = StreamDecoder(ours, np.array([padded, *cat], np.int32), skip_special_tokens=True)
    pieces = [stream.push(token) for token in [padded, *cat, 2**31 - 1, *cat]]
    assert "".join([*pieces, stream.finish()]) == "catcat"


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_other_vocabulary_files_are_logged(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is no tokenizer, and a warning names the file that was found instead."""
    (tmp_path / name).write_bytes(b"\0")
    with caplog.at_level(logging.WARNING, "jswa"):
        assert Tokenizer.load(tmp_path) is None
    assert name in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 5}, "eos_token = 5"),
        ({"bos_token": {"text": "<s>"}}, "bos_token"),
        ({"added_tokens_decoder": {"x": special("<x>")}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": [special("<x>")]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"7": 3}}, r"added_tokens_decoder\.7 = 3"),
        ({"extra_special_tokens": "abc"}, "extra_special_tokens = 'abc'"),
        ({"additional_special_tokens": [4]}, "extra_special_tokens = 4"),
        ([], "JSON object"),
    ],
)
def test_wrong_types_are_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    """CheckpointError names the file, the key and the value."""
    folder = write(FAMILIES["mimo"](tmp_path), {"tokenizer_config.json": config})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json.*{message}"):
        Tokenizer.load(folder)


def test_the_old_file_of_added_tokens_is_read(tmp_path: Path) -> None:
    """added_tokens.json has ids by text; tokens that special_tokens_map.json lists are special."""
    folder = FAMILIES["mistral"](tmp_path)
    first = load(folder).vocab_size - 1
    write(folder, {"added_tokens.json": {"[TOOL_CALLS]": first, "[A]": first + 1}})
    ours = load(folder)
    assert ours.encode("cat[TOOL_CALLS]").tolist()[-1] == first == ours.backend.token_to_id("[TOOL_CALLS]")
    assert (ours.decode([first]), ours.decode([first + 1])) == ("", "[A]")
    write(folder, {"added_tokens.json": {"<x>": "4"}})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json.*a token id"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("family", "path", "value"),
    [
        ("gemma3", ["post_processor", "special_tokens", "<bos>", "ids"], [2**31]),
        ("command_r", ["post_processor", "special_tokens"], {}),
        ("command_r", ["model", "continuing_subword_prefix"], "x"),
        ("mistral", ["model", "merges"], [["the", "nothing"]]),
        ("mimo", ["added_tokens"], 3),
    ],
)
def test_a_broken_tokenizer_is_refused_when_it_is_loaded(
    family: str, path: list[str], value: Any, tmp_path: Path
) -> None:
    """Also if the library panics, or fails only when it encodes."""
    folder = FAMILIES[family](tmp_path)
    table = json.loads((folder / "tokenizer.json").read_text())
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(write(folder, {"tokenizer.json": table}))


def test_text_that_cannot_be_tokenized_is_refused(tmp_path: Path) -> None:
    """The vocabulary has words only and no token for unknown ones."""
    backend = tokenizers.Tokenizer(models.WordLevel({"cat": 0}, unk_token="<unk>"))
    ours = load(write(tmp_path, {"tokenizer.json": backend}))
    assert ours.encode("cat").tolist() == [0]
    with pytest.raises(InvalidPrompt, match="cannot be tokenized"):
        ours.encode("dog")
