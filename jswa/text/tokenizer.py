"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

import logging
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers.decoders import DecodeStream

from jswa.errors import CheckpointError, InvalidPrompt
from jswa.text.special_tokens import SpecialTokens

# Vocabularies that transformers can turn into a tokenizer.json.
_OTHER_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "vocab.json")
_log = logging.getLogger(__name__)
_LONG = 4_096  # characters, or tokens, that take long enough for other threads to notice
_CONTEXT = 16  # tokens of the prompt that the first generated token is decoded after


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None) -> None:
        self.backend = backend
        self.special = special or SpecialTokens({}, {}, ())

    @staticmethod
    def load(folder: Path) -> "Tokenizer | None":
        """Read tokenizer.json, and what the files beside it add; None where there is no tokenizer.json.

        tokenizer.json is taken as it is, but for truncation and padding, which no prompt may have: so whether prompts
        begin with a bos token is for its post-processor to say, as in transformers 5. Raises CheckpointError where a
        file is corrupt.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            others = [name for name in _OTHER_FILES if (folder / name).exists()]
            if others:
                _log.warning("%s has %s, but no tokenizer.json: prompts must be token ids", folder, others[0])
            return None
        special = SpecialTokens.load(folder)
        try:
            loaded = Tokenizer(tokenizers.Tokenizer.from_file(str(path)), special)
            loaded.backend.no_truncation()
            loaded.backend.no_padding()
            special.add_to(loaded.backend, folder)
            before = loaded.encode("").tolist()  # what the post-processor puts there, and whether it works at all
        except BaseException as error:
            if not _of_the_library(error):
                raise
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
        bos = special.named.get("bos_token")
        if special.add_bos and bos is not None and loaded.token_id("bos_token") not in before:
            _log.warning("%s: add_bos_token has no effect, tokenizer.json does not put %r before prompts", folder, bos)
        return loaded

    def token_id(self, name: str) -> int | None:
        """Id of a special token by its name (`eos_token`); None where the checkpoint names none."""
        text = self.special.named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int[np.ndarray, " T"]:
        """Ids of a text. Raises InvalidPrompt where it has none, such as a string that is not valid Unicode."""
        try:
            if len(text) > _LONG:
                # It gives the same ids, lets other threads run meanwhile, and is quicker: no offsets are kept.
                (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoded = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return np.array(encoded.ids, np.int32)
        except BaseException as error:
            if not _of_the_library(error):
                raise
            raise InvalidPrompt("prompt", text, f"cannot be tokenized: {error}") from error

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not valid UTF-8 become U+FFFD."""
        if len(ids) > _LONG:  # lets other threads run meanwhile
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return self.backend.get_vocab_size()


def _of_the_library(error: BaseException) -> bool:
    """Whether tokenizers may have raised it: plain Exception, or a panic of Rust, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class StreamDecoder:
    """Text of one growing sequence, in pieces that never end within a character.

    The pieces together are the text that follows the prompt: decode(prompt + generated) without decode(prompt), with
    the end of the prompt as context.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Int[np.ndarray, " P"], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = prompt[-_CONTEXT:].tolist()
        self._held: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)

    def push(self, token: int) -> str:
        """What the token adds to the text: nothing while a character is incomplete."""
        try:
            piece = self._stream.step(self._tokenizer.backend, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            # Decoding is not monotonic here: give what is held its text, and go on from this token without context.
            before = self.finish()
            self._context, self._held = [], []
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return before + self.push(token)
        self._held.append(token)
        if piece:
            self._context, self._held = self._held, []
        return piece or ""

    def finish(self) -> str:
        """The text still held back, at the end of the sequence: an incomplete character becomes U+FFFD."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._context + self._held, skip_special_tokens=self._skip)
        return whole[len(before) :]


class StopStrings:
    """Cuts a text at the first of some strings, and holds back whatever may still become one.

    `push` takes pieces and gives the text that is safe to show; `stopped` is the string that was found.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self.stopped: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str:
        """Text to show now; after a stop string was found, nothing more."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The string that is complete first stops the text; of two that end together, the longer one.
            at, self.stopped = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(self.stopped)] if self._include else text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
