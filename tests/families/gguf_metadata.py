"""Metadata of GGUF files: read from a file, or made of a tokenizer.json as llama.cpp's converter makes it.

The reader is the tests' own, so that nothing of jswa judges itself.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jswa.gguf.vocabulary.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_PADDING = 37  # rows of the embedding without a token


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the values of a GGUF file by key."""
    with path.open("rb") as file:

        def number(code: str) -> Any:
            return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

        def value(kind: int) -> Any:
            if kind == _TEXT:
                return file.read(number("Q")).decode("utf-8")
            if kind == _LIST:
                inner, count = number("I"), number("Q")
                if inner != _TEXT:
                    code = f"<{count}{_NUMBERS[inner]}"
                    return list(struct.unpack(code, file.read(struct.calcsize(code))))
                return [value(inner) for _ in range(count)]
            return number(_NUMBERS[kind])

        assert file.read(4) == b"GGUF"
        _, _, count = number("I"), number("Q"), number("Q")
        return {value(_TEXT): value(number("I")) for _ in range(count)}


def converted(content: dict[str, Any], config: dict[str, Any], model: str, pre: str) -> dict[str, Any]:
    """Return what the converter writes of the tokenizer.json and tokenizer_config.json of a folder.

    Args:
        model: `gpt2`, or `llama` if the converter reads SentencePiece's file, whose scores order tokens.
        pre: the name of the way to split text.
    """
    added = {one["id"]: one for one in content["added_tokens"]}
    texts = {number: text for text, number in content["model"]["vocab"].items()}
    texts |= {number: one["content"] for number, one in added.items()}
    count = max(texts) + 1 + _PADDING
    kinds = [_kind(texts.get(at), added.get(at), model) for at in range(count)]
    tokens = [
        f"[PAD{at}]" if at not in texts else texts[at].replace("\u2581", " ") if kind == USER_DEFINED else texts[at]
        for at, kind in enumerate(kinds)
    ]
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in content["model"]["merges"]]
    ids = {one["content"]: number for number, one in added.items()}
    named = {name: config.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    known = {name: text["content"] if isinstance(text, dict) else text for name, text in named.items()}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    first = "SpecialToken" in str(content["post_processor"])
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": first,
        **{f"tokenizer.ggml.{keys[name]}_token_id": ids[text] for name, text in known.items() if text in ids},
        **({"tokenizer.chat_template": config["chat_template"]} if "chat_template" in config else {}),
        **(
            {"tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
            if model == "gpt2"
            else {
                "tokenizer.ggml.scores": list(_scores(merges, tokens, kinds, texts)),
                "tokenizer.ggml.add_space_prefix": "Prepend" in str(content["normalizer"]),
            }
        ),
    }


def _kind(text: str | None, added: dict[str, Any] | None, model: str) -> int:
    if text is None:
        return UNUSED
    if model == "llama" and text == "<unk>":
        return UNKNOWN
    if added is not None:
        looks = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
            text.startswith(start) and text.endswith(end)
            for start, end in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
        )
        return CONTROL if added["special"] or looks else USER_DEFINED
    return BYTE if model == "llama" and text.startswith("<0x") and len(text) == 6 else NORMAL


def _scores(
    merges: list[tuple[str, ...]], tokens: list[str], kinds: list[int], texts: dict[int, str]
) -> Iterator[float]:
    """Yield scores that order tokens as merges do: the later a token is merged, the lower its score.

    Runs of tabs share the highest score, and runs of U+2581 of Llama's the lowest, as in SentencePiece's files.
    """
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    llama = not any(text == "\u2581" * 2 for at, text in texts.items() if kinds[at] == USER_DEFINED)
    for at in range(len(tokens)):
        text = texts.get(at, "")
        if kinds[at] in (CONTROL, USER_DEFINED, UNUSED):
            yield -1000.0
        elif kinds[at] == NORMAL and text and not text.strip("\t"):
            yield 0.0
        elif kinds[at] == NORMAL and len(text) > 1 and not text.strip("\u2581") and llama:
            yield -1e9
        else:
            yield float(-ranks.get(text, len(ranks)))
