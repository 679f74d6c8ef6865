"""Log probabilities as the two APIs show them, and the texts of single tokens."""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from jswa.plan import ChoiceLogprobs
from jswa.text.detokenizer import StreamDecoder
from jswa.text.tokenizer import Tokenizer

from .prompts import Prompt

_LOWEST = -9999.0  # what JSON has for minus infinity, as in vLLM
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Bytes by the characters that byte-level vocabularies write for them (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.raw = lru_cache(maxsize=1 << 16)(self._raw)

    def label(self, token: int) -> str:
        r"""The token's text; a part of a character as OpenAI writes it, `bytes:\xe4`."""
        text = self.text(token)
        return text if "�" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token))

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _raw(self, token: int) -> bytes:
        text = self.text(token)
        if "�" not in text or self._tokenizer is None:
            return text.encode()
        piece = self._tokenizer.backend.id_to_token(token) or text
        if single := _BYTE.fullmatch(piece):
            return bytes([int(single[1], 16)])
        table = _byte_of()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else text.encode()


def number(logprob: float) -> float:
    """A log probability that JSON can have."""
    return logprob if math.isfinite(logprob) else _LOWEST


def legacy(entries: Iterable[tuple[ChoiceLogprobs | int, int]], top: int, texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a completion, from (log probabilities or a token without, offset in the text) by position.

    Of two tokens with the same text the second is listed as `token_id:7`, so none is lost. The token that stands there
    is always listed, with the same number as in `token_logprobs`.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for at, offset in entries:
        offsets.append(offset)
        if isinstance(at, int):
            tokens.append(texts.label(at))
            values.append(None)
            tops.append(None)
            continue
        tokens.append(texts.label(at.token))
        values.append(number(at.logprob))
        listed = {tokens[-1]: number(at.logprob)}
        for token, logprob in zip(at.top_ids[:top], at.top_logprobs[:top], strict=True):
            if token != at.token:
                label = texts.label(token)
                listed[label if label not in listed else f"token_id:{token}"] = number(logprob)
        tops.append(listed)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def of_chat(at: ChoiceLogprobs, top: int, texts: TokenTexts) -> dict[str, Any]:
    """One entry of a chat choice's `logprobs.content`."""
    return {
        **_entry(at.token, at.logprob, texts),
        "top_logprobs": [
            _entry(token, logprob, texts)
            for token, logprob in zip(at.top_ids[:top], at.top_logprobs[:top], strict=True)
        ],
    }


def of_prompt(entries: Sequence[ChoiceLogprobs], top: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by position, None for the first; there by token id."""
    found: list[dict[str, Any] | None] = [None]
    for at in entries:
        table = {str(at.token): _ranked(at.token, at.logprob, at.rank, texts)}
        pairs = zip(at.top_ids[:top], at.top_logprobs[:top], strict=True)
        for rank, (token, logprob) in enumerate(pairs, start=1):
            table.setdefault(str(token), _ranked(token, logprob, rank, texts))
        found.append(table)
    return found


def prompt_offsets(prompt: Prompt, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> tuple[str, list[int]]:
    """The prompt's text, and where in it each token begins."""
    if tokenizer is None:
        return "", [0] * len(prompt.ids)
    decoder = StreamDecoder(tokenizer, prompt.ids[:0], skip_special_tokens=skip_special_tokens)
    pieces, offsets, length = [], [], 0
    for token in prompt.ids.tolist():
        offsets.append(length)
        pieces.append(decoder.push(token))
        length += len(pieces[-1])
    text = "".join(pieces) + decoder.finish()
    return prompt.text if prompt.text is not None else text, offsets


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.label(token), "logprob": number(logprob), "bytes": list(texts.raw(token))}


def _ranked(token: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": number(logprob), "rank": rank, "decoded_token": texts.text(token)}
