"""Tokenizers of GGUF files beside the families' own: `python -m tests.families.gguf_tokenizers [--only TEXT]`.

Prints a line for each tokenizer. Fails if texts get other ids, with or without special tokens, or if ids get other
text. The vocabularies are those of packages, written as llama.cpp's converter writes them, and those that llama.cpp
ships with ids that the families' tokenizers gave.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jswa.gguf.tokenizer import tokenizer_files
from jswa.text.tokenizer import Tokenizer
from tests.families.gguf_metadata import converted, read_metadata
from tests.families.material import FOLDER
from tests.families.texts import texts

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
# Tokenizers from before transformers ordered merges of equal scores by length: long runs of spaces get other ids.
OLDER = ("vocabularies/gemini",)
TEXTS = 10_000
_LONG_RUN = re.compile(r" {17}|\t{17}|\n{17}")
_BETWEEN = "\n__ggml_vocab_test__\n"


def differences(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer, given: list[str]) -> Iterator[str]:
    """Yield what differs: a text and the ids that it gets, or ids and their texts."""
    for special in (True, False):
        both = zip(
            given, *(one.encode_batch_fast(given, add_special_tokens=special) for one in (ours, theirs)), strict=True
        )
        for text, our, their in both:
            if our.ids != their.ids:
                yield f"{text!r}: {our.ids} and {their.ids}"
    ids = [one.ids for one in theirs.encode_batch_fast(given, add_special_tokens=True)]
    both_texts = zip(ids, *(one.decode_batch(ids, skip_special_tokens=False) for one in (ours, theirs)), strict=True)
    yield from (f"{one}: {our!r} and {their!r}" for one, our, their in both_texts if our != their)


def _read(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer that jswa reads from the files."""
    files = tokenizer_files(metadata)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(files.config), encoding="utf-8")
        tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer.backend


def _of_packages(only: str) -> Iterator[tuple[str, list[str], int]]:
    for name, (model, pre) in CASES.items():
        if only not in name:
            continue
        theirs = tokenizers.Tokenizer.from_file(str(FOLDER / name / "tokenizer.json"))
        theirs.no_truncation()
        theirs.no_padding()
        content, config = (
            json.loads((FOLDER / name / file).read_text()) for file in ("tokenizer.json", "tokenizer_config.json")
        )
        ours = _read(converted(content, config, model, pre))
        special = [one["content"] for one in content["added_tokens"]]
        given = texts(special, 67, TEXTS)
        chosen = [text for text in given if name not in OLDER or not _LONG_RUN.search(text)]
        yield name, list(differences(ours, theirs, chosen)), len(chosen)


def _of_llama_cpp(only: str) -> Iterator[tuple[str, list[str], int]]:
    for path in sorted((FOLDER / "gguf").glob("*.gguf")):
        if only not in path.name:
            continue
        ours = _read(read_metadata(path))
        given = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(_BETWEEN)
        lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
        both = zip(given, lines, strict=False)  # one of the files ends with a newline
        wrong = [
            text
            for text, line in both
            if ours.encode(text, add_special_tokens=False).ids != list(map(int, line.split()))
        ]
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
