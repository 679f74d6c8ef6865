"""Each way to split text that llama.cpp has a name for, on texts that tell them apart."""

import pytest
import tokenizers

from jswa.gguf.tokenizer import tokenizer_files
from jswa.gguf.vocabulary.pre_tokenizers import PRE_TOKENIZERS
from tests.support.text.gguf import byte_level

TEXT = "I'M 12345 HTTPServer's a.b/\n\n  x"
LLAMA3 = "I|'M| |123|45| HTTPServer|'s| a|.b|/\n\n| | x"
OF_LLAMA3 = ("chatglm-bpe", "dbrx", "glm4", "llama-bpe", "llama-v3", "llama3", "smaug-bpe")
PIECES = {
    **dict.fromkeys(OF_LLAMA3, LLAMA3),
    "qwen2": "I|'M| |1|2|3|4|5| HTTPServer|'s| a|.b|/\n\n| | x",
    **dict.fromkeys(("gpt-4o", "llama4"), "I'M| |123|45| HTTPServer's| a|.b|/\n\n| | x"),
    "tekken": "I|'M| |1|2|3|4|5| HTTPServer|'s| a|.b|/\n\n| | x",
    "hunyuan-dense": "I|'M| |123|45| HTTPServer|'s| a|.b|/\n\n| | x",
    "deepseek-v3": "I|'M| |123|45| HTTPServer|'s| a|.b|/\n\n| | x",
    "afmoe": "I|'M| |12|345| HTTPServer|'s| a|.b|/\n\n| | x",
    "seed-coder": "I|'M| |1|2|3|4|5| HTTPServer|'s| a|.b|/|\n\n| | x",
    "laguna": "I|'M| |1|2|3|4|5| HTTPServer|'s| a|.b|/|\n\n| | x",
    "exaone-moe": "I|'M| |1|2|3|4|5| HTTPServer|'s| a|.b|/\n|\n| | x",
    **dict.fromkeys(("exaone4", "gpt-2", "olmo"), "I|'|M| 12345| HTTPServer|'s| a|.|b|/|\n\n | x"),
    **dict.fromkeys(
        ("command-r", "mellum2", "refact", "smollm", "starcoder"), "I|'|M| |1|2|3|4|5| HTTPServer|'s| a|.|b|/|\n\n | x"
    ),
}
NFC = ("command-r", "exaone-moe", "exaone4", "olmo", "qwen2")


def backend(pre: str) -> tokenizers.Tokenizer:
    """The tokenizer of a small vocabulary."""
    return tokenizers.Tokenizer.from_str(tokenizer_files(byte_level(pre)).tokenizer)


def test_all_names_are_tested() -> None:
    assert PIECES.keys() == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_as_the_family_does(pre: str) -> None:
    splitter = backend(pre).pre_tokenizer
    assert splitter is not None
    spans = [span for _, span in splitter.pre_tokenize_str(TEXT)]
    assert "|".join(TEXT[start:end] for start, end in spans) == PIECES[pre]


@pytest.mark.parametrize("pre", PIECES)
def test_letters_and_their_marks_are_joined_only_where_the_family_does(pre: str) -> None:
    tokenizer = backend(pre)
    assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) == (pre in NFC)


@pytest.mark.parametrize("pre", PIECES)
def test_a_word_that_is_a_token_needs_no_merges_where_the_family_says_so(pre: str) -> None:
    metadata = byte_level(pre, merges=["o x"])
    metadata["tokenizer.ggml.merges"] = []
    text = tokenizers.Tokenizer.from_str(tokenizer_files(metadata).tokenizer)
    assert (len(text.encode("ox", add_special_tokens=False).ids) == 1) == PRE_TOKENIZERS[pre].ignore_merges


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("afmoe", "1234567 \u0e40\u0e41 \u4e00x", "1|234|567| |\u0e40\u0e41| |\u4e00|x"),
        ("exaone-moe", "of the  end", "of the| | end"),
        ("laguna", "a\n\n b", "a|\n\n| b"),
    ],
)
def test_what_tells_a_family_from_its_neighbours(pre: str, text: str, pieces: str) -> None:
    splitter = backend(pre).pre_tokenizer
    assert splitter is not None
    assert "|".join(text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)) == pieces
