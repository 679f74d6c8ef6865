"""Log probabilities in the formats of the two APIs, and the texts of single tokens."""

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.plan import ChoiceLogprobs
from jswa.text.detokenizer import StreamDecoder
from jswa.text.tokenizer import Tokenizer

from ..http.pieces import JsonList, encode
from .prompts import Prompt

_LOWEST = -9999.0  # stands for minus infinity, which JSON lacks, as in vLLM
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Return the byte for each character by which byte-level vocabularies write bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    """A cache of the texts and bytes of single tokens.

    Attributes:
        text: returns the text of a token.
        raw: returns the bytes of a token.
        around: returns the JSON before and after the number in a chat's entry of a token.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.raw = lru_cache(maxsize=1 << 16)(self._raw)
        self.around = lru_cache(maxsize=1 << 16)(self._around)

    def label(self, token: int) -> str:
        r"""Return the token's text. A token that is a part of a character is written as by OpenAI: `bytes:\xe4`."""
        text = self.text(token)
        return text if "�" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token))

    def _around(self, token: int) -> tuple[str, str]:
        """Return the JSON before and after the number in a chat's entry of the token."""
        label, raw = encode(self.label(token)).decode(), encode(list(self.raw(token))).decode()
        return f'{{"token":{label},"logprob":', f',"bytes":{raw}'

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
    """Return a log probability as a number that JSON has."""
    return logprob if math.isfinite(logprob) else _LOWEST


class Columns:
    """The `logprobs` of a completion: four arrays with an item for each position, encoded when the position is added.

    If two tokens have the same text, the second is listed as `token_id:7`, so that none is lost. The token at the
    position is always listed, with the same number as in `token_logprobs`.
    """

    _NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, top: int, texts: TokenTexts) -> None:
        self._top = top
        self._texts = texts
        self._columns = tuple(JsonList() for _ in self._NAMES)

    def add(self, at: ChoiceLogprobs | int, offset: int) -> None:
        """Add a position.

        Args:
            at: the log probabilities of the position, or its token if it has none.
            offset: characters of the text before the token.
        """
        if isinstance(at, int):
            self._row(encode(self._texts.label(at)), b"null", b"null", offset)
            return
        label = self._texts.label(at.token)
        listed = {label: number(at.logprob)}
        for token, logprob in zip(at.top_ids[: self._top], at.top_logprobs[: self._top], strict=True):
            if token != at.token:
                other = self._texts.label(token)
                listed[other if other not in listed else f"token_id:{token}"] = number(logprob)
        self._row(encode(label), encode(number(at.logprob)), encode(listed), offset)

    def pieces(self, before: "Columns | None" = None) -> list[bytes]:
        """Return the JSON of the object in pieces. The positions of `before` come first."""
        pieces: list[bytes] = []
        for name, column, first in zip(
            self._NAMES, self._columns, before.columns if before else [None] * 4, strict=True
        ):
            pieces += [b'%c"%b":' % (b"," if pieces else b"{", name.encode()), *column.pieces(first)]
        return [*pieces, b"}"]

    @property
    def columns(self) -> tuple[JsonList, ...]:
        """The four arrays."""
        return self._columns

    def _row(self, *items: Any) -> None:
        *encoded, offset = items
        for column, item in zip(self._columns, (*encoded, b"%d" % offset), strict=True):
            column.add(item)


def of_chat(at: ChoiceLogprobs, top: int, texts: TokenTexts) -> bytes:
    """Return the JSON of one entry of a chat choice's `logprobs.content`."""
    others = (
        _entry(token, logprob, texts) for token, logprob in zip(at.top_ids[:top], at.top_logprobs[:top], strict=True)
    )
    return f'{_entry(at.token, at.logprob, texts)[:-1]},"top_logprobs":[{",".join(others)}]}}'.encode()


def of_prompt(entries: Iterable[ChoiceLogprobs], top: int, texts: TokenTexts) -> Iterator[bytes]:
    """Yield the items of vLLM's `prompt_logprobs` in JSON: null for the first token, then an object by token id."""
    yield b"null"
    for at in entries:
        table = {str(at.token): _ranked(at.token, at.logprob, at.rank, texts)}
        pairs = zip(at.top_ids[:top], at.top_logprobs[:top], strict=True)
        for rank, (token, logprob) in enumerate(pairs, start=1):
            table.setdefault(str(token), _ranked(token, logprob, rank, texts))
        yield encode(table)


def prompt_offsets(
    prompt: Prompt, tokenizer: Tokenizer | None, *, skip_special_tokens: bool
) -> tuple[str, Int[np.ndarray, " P"]]:
    """Return the prompt's text, and for each of its tokens the characters before it."""
    if tokenizer is None:
        return "", np.zeros(len(prompt.ids), np.int32)
    decoder = StreamDecoder(tokenizer, prompt.ids[:0], skip_special_tokens=skip_special_tokens)
    pieces, offsets, length = [], [], 0
    for token in prompt.ids.tolist():
        offsets.append(length)
        pieces.append(decoder.push(token))
        length += len(pieces[-1])
    text = "".join(pieces) + decoder.finish()
    return prompt.text if prompt.text is not None else text, np.array(offsets, np.int32)


def _entry(token: int, logprob: float, texts: TokenTexts) -> str:
    before, behind = texts.around(token)
    return f"{before}{number(logprob)!r}{behind}}}"


def _ranked(token: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": number(logprob), "rank": rank, "decoded_token": texts.text(token)}
