"""Incremental detokenization: pieces never end within a character, and joined they are the whole text."""

import logging
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jswa.errors import CheckpointError, InvalidPrompt
from jswa.text.detokenizer import StreamDecoder, decode_behind
from jswa.text.special_tokens import SpecialTokens
from jswa.text.tokenizer import Tokenizer

SPECIAL = "<end>"


def byte_level() -> Tokenizer:
    """Return a tokenizer in which every byte is a token, as in gpt-2's alphabet, with one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer as in llama: ▁ for spaces, bytes for unknown characters, one leading space stripped."""
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    vocab |= {word: 257 + i for i, word in enumerate(["▁the", "▁cat", "s", "▁", "é"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> list[str]:
    """Return the pieces of a sequence; the last one is the text held back until the end."""
    decoder = StreamDecoder(tokenizer, np.array(prompt, np.int32), skip_special_tokens=skip)
    return [*[decoder.push(token) for token in ids], decoder.finish()]


@pytest.mark.parametrize(
    ("vocab_size", "special", "level"),
    [(257, {}, None), (300, {}, None), (256, {}, "INFO"), (256, {"eos_token": SPECIAL}, "WARNING")],
)
def test_a_model_may_lack_added_tokens(
    vocab_size: int, special: dict[str, str], level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the tokens; it is a warning if prompts begin or texts end with one of them."""
    tokenizer = Tokenizer(byte_level().backend, SpecialTokens(special, {}, ()))
    with caplog.at_level(logging.INFO, "jswa"):
        tokenizer.require_fit(vocab_size, Path("folder"))
    assert [record.levelname for record in caplog.records] == ([] if level is None else [level])
    assert level is None or "which has 256 tokens, lacks 1 of the tokenizer: '<end>'" in caplog.text


@pytest.mark.parametrize("vocab_size", [1, 100, 255])
def test_a_tokenizer_whose_vocabulary_is_larger_than_the_models_is_refused(vocab_size: int) -> None:
    """Texts would have tokens that the model does not know, and the others would mean something else to it."""
    said = f"folder: tokenizer.json has 257 tokens, the model {vocab_size}: they do not belong together"
    with pytest.raises(CheckpointError, match=said):
        byte_level().require_fit(vocab_size, Path("folder"))


@given(st.text(max_size=40), st.text(max_size=12))
def test_pieces_of_any_text_join_to_the_text(text: str, prompt: str) -> None:
    """Byte-level: the encoded text comes back, even if characters span several tokens."""
    tokenizer = TOKENIZERS["byte_level"]
    pieces = stream(tokenizer, tokenizer.encode(prompt).tolist(), tokenizer.encode(text).tolist())
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, TOKENIZERS["byte_level"].vocab_size - 1), max_size=30))
def test_pieces_of_random_bytes_join_to_the_whole_decode(ids: list[int]) -> None:
    """Also for invalid UTF-8: the pieces joined equal the text of all tokens decoded at once."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("the cats").tolist()
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, prompt, ids)) == tokenizer.decode(prompt + ids)


@given(st.lists(st.sampled_from(["▁the", "▁cat", "s", "▁", "é", *"aß漢😀"]), max_size=12))
def test_pieces_with_byte_fallback_join_to_the_whole_decode(words: list[str]) -> None:
    """Characters that the vocabulary lacks are several tokens, one per byte."""
    tokenizer = TOKENIZERS["byte_fallback"]
    vocab = tokenizer.backend.get_vocab()
    tokens = [[vocab[w]] if w in vocab else [vocab[f"<0x{b:02X}>"] for b in w.encode()] for w in words]
    prompt, ids = [vocab["▁the"], vocab["▁cat"]], [token for word in tokens for token in word]
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, prompt, ids)) == tokenizer.decode(prompt + ids)


@given(st.text(min_size=1, max_size=30))
def test_no_piece_ends_within_a_character(text: str) -> None:
    """Valid text never shows a replacement character."""
    tokenizer = TOKENIZERS["byte_level"]
    for piece in stream(tokenizer, [], tokenizer.encode(text).tolist()):
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.data(), st.sampled_from(sorted(TOKENIZERS)), st.booleans())
def test_text_that_is_decoded_at_its_end_is_that_of_its_pieces(data: st.DataObject, name: str, skip: bool) -> None:
    """Whatever the tokens are: characters cut by the prompt's end, invalid bytes, special tokens."""
    tokenizer = TOKENIZERS[name]
    # Of byte_fallback, the whole vocabulary; of byte_level, letters and bytes of longer characters in equal parts.
    tokens = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(tokenizer.encode("é漢 a").tolist())
    prompt, ids = data.draw(st.lists(tokens, max_size=20)), data.draw(st.lists(tokens, max_size=20))
    whole = decode_behind(tokenizer, np.array(prompt, np.int32), ids, skip_special_tokens=skip)
    assert whole == "".join(stream(tokenizer, prompt, ids, skip=skip))


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    """Three of the four bytes of an emoji are held back until the end, and then become one replacement character."""
    tokenizer = TOKENIZERS["byte_level"]
    pieces = stream(tokenizer, [], tokenizer.encode("a😀").tolist()[:-1])
    assert pieces[:-1] == ["a", "", "", ""]
    assert pieces[-1] == "\ufffd"


def test_a_character_that_the_prompt_begins_is_the_first_of_the_text() -> None:
    """And nothing else of the prompt is."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("cat 😀").tolist()
    assert stream(tokenizer, prompt[:-1], [prompt[-1], *prompt[:3]]) == ["😀", "c", "a", "t", ""]


def test_a_leading_space_after_the_prompt_is_kept() -> None:
    """As in vLLM, prompt + text is the continued text."""
    tokenizer = TOKENIZERS["byte_fallback"]
    the, cat = 257, 258
    assert "".join(stream(tokenizer, [the], [cat])) == " cat"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    """`skip_special_tokens` decides."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("hi").tolist(), tokenizer.vocab_size - 1]
    assert "".join(stream(tokenizer, [], ids)) == "hi"
    assert "".join(stream(tokenizer, [], ids, skip=False)) == "hi" + SPECIAL


def test_a_corrupt_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """CheckpointError names the file; no file at all is fine."""
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "No')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_invalid_unicode_is_refused() -> None:
    """A lone surrogate cannot be encoded."""
    with pytest.raises(InvalidPrompt, match="prompt"):
        TOKENIZERS["byte_level"].encode("a\ud800")
