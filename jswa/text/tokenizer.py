"""Encode text to token ids and decode ids to text with the checkpoint's tokenizer.json."""

import logging
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int

from jswa.errors import CheckpointError, InvalidPrompt
from jswa.storage.checkpoint_files import is_there, read_file
from jswa.storage.json_object import require_few
from jswa.text.special_tokens import SpecialTokens

# Vocabulary files that transformers can convert to a tokenizer.json.
_OTHER_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "vocab.json")
_MOST_BYTES, _MOST_VALUES = 2**26, 4_000_000  # of tokenizer.json: twice what the largest known ones have
_log = logging.getLogger(__name__)
_LONG = 4_096  # characters or tokens from which a call would block other threads noticeably


class Tokenizer:
    """A checkpoint's tokenizer: the `tokenizers` backend and the special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None) -> None:
        self.backend = backend
        self.special = special or SpecialTokens({}, {}, ())

    @staticmethod
    def load(folder: Path) -> "Tokenizer | None":
        """Load tokenizer.json and the special tokens of the files next to it; None if there is no tokenizer.json.

        tokenizer.json is used unchanged, except that truncation and padding are turned off. So its post-processor
        decides whether prompts begin with a BOS token, as in transformers 5. Raises CheckpointError if a file is
        corrupt.
        """
        path = folder / "tokenizer.json"
        if not is_there(path):
            others = [name for name in _OTHER_FILES if is_there(folder / name)]
            if others:
                _log.warning("%s has %s but no tokenizer.json: prompts must be token ids", folder, others[0])
            return None
        special = SpecialTokens.load(folder)
        content = read_file(path, _MOST_BYTES)
        require_few(content, _MOST_VALUES, str(path))
        try:
            loaded = Tokenizer(tokenizers.Tokenizer.from_buffer(content), special)
            loaded.backend.no_truncation()
            loaded.backend.no_padding()
            special.add_to(loaded.backend, folder)
            before = loaded.encode("").tolist()  # the post-processor's tokens; also proves that encoding works
        except BaseException as error:
            if not _from_library(error):
                raise
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
        bos = special.named.get("bos_token")
        if special.add_bos and bos is not None and loaded.token_id("bos_token") not in before:
            _log.warning("%s: add_bos_token has no effect: tokenizer.json does not put %r before prompts", folder, bos)
        return loaded

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token by its name (`eos_token`), or None if the checkpoint has no such token."""
        text = self.special.named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int[np.ndarray, " T"]:
        """Return the token ids of a text. Raises InvalidPrompt if it cannot be tokenized, such as invalid Unicode."""
        try:
            if len(text) > _LONG:
                # Same ids, but other threads can run meanwhile, and it is faster because it keeps no offsets.
                (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoded = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return np.array(encoded.ids, np.int32)
        except BaseException as error:
            if not _from_library(error):
                raise
            raise InvalidPrompt("prompt", text, f"cannot be tokenized: {error}") from error

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; bytes that are not valid UTF-8 become U+FFFD."""
        if len(ids) > _LONG:  # other threads can run meanwhile
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ends(self) -> tuple[int, int]:
        """The numbers of special tokens that the post-processor puts before and behind a text."""
        own, whole = self.encode("a", add_special_tokens=False).tolist(), self.encode("a").tolist()
        places = range(len(whole) - len(own) + 1)
        before = next((at for at in places if whole[at : at + len(own)] == own), len(whole) - len(own))
        return before, max(0, len(whole) - len(own) - before)

    def cut(self, ids: Int[np.ndarray, " T"], most: int, *, keep_last: bool) -> Int[np.ndarray, " N"]:
        """Return the first or the last tokens of a text with its special tokens, at most `most` (≥ 1) with these."""
        if len(ids) <= most:
            return ids
        before, behind = self.special_ends
        room = most - before - behind
        if room < 1:
            return ids[-most:] if keep_last else ids[:most]
        text = ids[before : len(ids) - behind]
        text = text[-room:] if keep_last else text[:room]
        return np.concatenate([ids[:before], text, ids[len(ids) - behind :]])

    @cached_property
    def longest_token(self) -> int:
        """The most characters of text that one token stands for, special tokens included. At least 1.

        The vocabulary writes a byte as a character or as <0x0A>, and no character has less than a byte.
        """
        return max(map(len, self.backend.get_vocab()), default=1)

    def require_fit(self, vocab_size: int, folder: Path) -> None:
        """Raise CheckpointError if tokens of the vocabulary have no row in the embedding of the model.

        Added tokens may have none: the text models of Gemma lack the token of images, and some fine-tuned models one
        for padding. The log names them.

        Args:
            vocab_size: rows of the embedding.
            folder: that of the checkpoint, for the message.
        """
        if self.vocab_size <= vocab_size:
            return  # the list of all tokens takes 0.3 s
        beyond = {found: text for text, found in self.backend.get_vocab().items() if found >= vocab_size}
        if beyond.keys() - self.backend.get_added_tokens_decoder().keys():
            sizes = f"tokenizer.json has {max(beyond) + 1:,} tokens, the model {vocab_size:,}"
            raise CheckpointError(f"{folder}: {sizes}: they do not belong together")
        if beyond:
            ends = {self.token_id("bos_token"), self.token_id("eos_token")} & beyond.keys()
            names = ", ".join(repr(beyond[found]) for found in sorted(beyond)[:3]) + (" …" if len(beyond) > 3 else "")
            _log.log(
                logging.WARNING if ends else logging.INFO,
                "%s: the model, which has %s tokens, lacks %d of the tokenizer: %s; prompts with them are refused",
                *(folder, f"{vocab_size:,}", len(beyond), names),
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included."""
        return self.backend.get_vocab_size()


def _from_library(error: BaseException) -> bool:
    """Whether `tokenizers` may have raised the error: an Exception, or a Rust panic, which is only a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
