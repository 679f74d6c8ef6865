"""Tokenizers of GGUF files beside the families' own: `python -m tests.families.gguf_tokenizers [--only TEXT]`.

Prints a line for each tokenizer. Fails if texts get other ids, with or without special tokens, or if ids get other text.
The vocabularies are those of packages, written as llama.cpp's converter writes them, and those that llama.cpp ships with
ids that the families' tokenizers gave.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from jswa.gguf.tokenizer import tokenizer_files
from tests.families.gguf_metadata import converted, read_metadata
from tests.families.material import FOLDER

# Folder of a tokenizer, and `tokenizer.ggml.model` and `.pre` of it.
CASES = {
    "tokenizers/llama3": ("gpt2", "llama-bpe"),
    "tokenizers/llama3_1": ("gpt2", "llama-bpe"),
    "tokenizers/gptoss": ("gpt2", "gpt-4o"),
    "tokenizers/qwen3": ("gpt2", "qwen2"),
    "tokenizers/gemma3": ("llama", "default"),
    "vocabularies/llama2": ("llama", "default"),
    "vocabularies/gemini": ("llama", "default"),
    "vocabularies/gpt4o": ("gpt2", "gpt-4o"),
    "vocabularies/gpt35turbo": ("gpt2", "dbrx"),
    "vocabularies/deepseek_v3": ("gpt2", "deepseek-v3"),
}
TEXTS = 10_000
_BETWEEN = "\n__ggml_vocab_test__\n"
_SCRIPTS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "äöüßéèñçøåœæ", "абвгдежзийклмн", "αβγδεζηθ", "אבגדהוז",
    "ابتثجحخد", "हिन्दीकखगघ", "กขคงจฉช", "日本語漢字中文", "ひらがなカタカナ", "한국어가나다", "ΑΒΓ", "ⅣⅧ½²³", "٠١٢٣", "ǅǈʰˠ",
)  # fmt: skip
_MARKS = ("\u0301", "\u0308", "\u200d", "\ufe0f", "\u1161", "\u0e34", "\u093f")
_EMOJI = ("🦙", "👩‍👩‍👧", "🏳️‍🌈", "😶‍🌫️", "❤", "🇩🇪", "👍🏽")
_CODE = ("def f(x):\n\treturn x+1\n", "for (int i=0;i<n;++i) {", "</div>", "==!=<=>=&&||", "::std", "\\d+\\.\\w*", "%s\r\n", "#include")
_ENDINGS = ("'s", "'T", "'re", "'LL", "’s", "'d", "n't")
_STRANGE = ("\ufffd", "\x00", "\x07", "\x1b[0m", "\x7f", "\u2028", "\u00a0", "\u3000", "\u2581", "\u2581\u2581", "\ufeff", "𝕬𝖇", "\U0010ffff")


def texts(special: Sequence[str], seed: int, count: int = TEXTS) -> Iterator[str]:
    """Yield texts of many scripts, code, digits, runs of spaces, strange characters and special tokens."""
    draw = random.Random(seed)
    pick = draw.choice

    def word() -> str:
        return "".join(pick(letters) for letters in [pick(_SCRIPTS)] for _ in range(draw.randint(1, 9)))

    kinds = [
        word, word, word, lambda: word().capitalize(), lambda: word() + pick(_ENDINGS), lambda: word() + pick(_MARKS),
        lambda: str(draw.randrange(10 ** draw.randint(1, 9))), lambda: pick(_EMOJI), lambda: pick(_CODE),
        lambda: pick(" \t\n\r") * draw.randint(1, 40), lambda: pick(("\r\n", " \n", "\n ", "\t ", "  \n\n")) * draw.randint(1, 4),
        lambda: pick("!?.,:;-_=+*/\\()[]{}<>@#$%^&|~`\"'") * draw.randint(1, 5), lambda: pick(_STRANGE), lambda: pick(special),
        lambda: chr(draw.choice((draw.randrange(0x20, 0xD800), draw.randrange(0xE000, 0x10FFFF)))), lambda: pick(special)[:-1],
    ]  # fmt: skip
    for _ in range(count):
        yield "".join(pick(kinds)() + pick(("", " ", " ")) for _ in range(draw.randint(1, 12)))


def differences(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer, given: list[str]) -> Iterator[str]:
    """Yield what differs: a text and the ids that it gets, or ids and their texts."""
    for special in (True, False):
        both = zip(given, *(one.encode_batch_fast(given, add_special_tokens=special) for one in (ours, theirs)), strict=True)
        for text, our, their in both:
            if our.ids != their.ids:
                yield f"{text!r}: {our.ids} and {their.ids}"
    ids = [one.ids for one in theirs.encode_batch_fast(given, add_special_tokens=True)]
    both_texts = zip(ids, *(one.decode_batch(ids, skip_special_tokens=False) for one in (ours, theirs)), strict=True)
    yield from (f"{one}: {our!r} and {their!r}" for one, our, their in both_texts if our != their)


def _loaded(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _of_packages(only: str) -> Iterator[tuple[str, list[str], int]]:
    for name, (model, pre) in CASES.items():
        if only not in name:
            continue
        theirs = _loaded(FOLDER / name / "tokenizer.json")
        content, config = (json.loads((FOLDER / name / file).read_text()) for file in ("tokenizer.json", "tokenizer_config.json"))
        files = tokenizer_files(converted(content, config, model, pre))
        ours = tokenizers.Tokenizer.from_str(files.tokenizer)
        special = [one["content"] for one in content["added_tokens"]]
        yield name, list(differences(ours, theirs, list(texts(special, seed=67)))), TEXTS


def _of_llama_cpp(only: str) -> Iterator[tuple[str, list[str], int]]:
    for path in sorted((FOLDER / "gguf").glob("*.gguf")):
        if only not in path.name:
            continue
        ours = tokenizers.Tokenizer.from_str(tokenizer_files(read_metadata(path)).tokenizer)
        given = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(_BETWEEN)
        lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
        both = zip(given, lines, strict=False)  # one of the files ends with a newline
        wrong = [text for text, line in both if ours.encode(text, add_special_tokens=False).ids != list(map(int, line.split()))]
        yield path.name, wrong, len(given)


def main() -> int:
    """Print the table; return 1 if a tokenizer differs."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", default="", help="part of a tokenizer's name")
    only, failed = options.parse_args().only, 0
    for rows in (_of_packages(only), _of_llama_cpp(only)):
        for name, wrong, count in rows:
            print(f"| {name} | {count} texts | {f'{len(wrong)} WRONG: {wrong[0]}' if wrong else 'equal'} |", flush=True)
            failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
