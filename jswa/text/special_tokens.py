"""Read the special and added tokens of a checkpoint from the files next to tokenizer.json.

They are read as transformers 5 reads them: from tokenizer_config.json and, if it has no `added_tokens_decoder`, also
from special_tokens_map.json, which overrides it, and added_tokens.json. A token is a string, or an object with the
string as `content`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jswa.errors import CheckpointError
from jswa.storage.json_object import read_optional

CONFIG = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # two names of one key; the newer name wins
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens by name, and the tokens to add to a tokenizer.

    Attributes:
        named: text of each special token by the name that chat templates use: bos_token, eos_token, …, and names that
            only this model has (boi_token).
        added: tokens by the id that each should have, special or not.
        special: all special tokens, named or not.
        add_bos: the config's `add_bos_token`; None if it is absent.
    """

    named: Mapping[str, str]
    added: Mapping[int, AddedToken]
    special: tuple[AddedToken, ...]
    add_bos: bool | None = None

    @staticmethod
    def load(folder: Path) -> "SpecialTokens":
        """Read the files of a checkpoint; empty if there are none. Raises CheckpointError."""
        config = read_optional(folder / CONFIG)
        where, added = folder / CONFIG, config.get("added_tokens_decoder")
        if added is None:
            config = {**config, **read_optional(folder / _MAP)}
        named = {name: _token(config[name], where, name) for name in NAMES if config.get(name) is not None}
        named |= {name: _token(text, where, name) for name, text in _own_names(config).items()}
        listed: Any = next((config[key] for key in _LISTS if config.get(key)), [])
        if isinstance(listed, dict):
            named |= {name: _token(value, where, name) for name, value in listed.items()}
            listed = []
        if not isinstance(listed, list):
            raise CheckpointError(f"{where}: {_LISTS[0]} = {listed!r:.80}: must be a list of tokens")
        special = [*named.values(), *(_token(value, where, _LISTS[0]) for value in listed)]
        for token in special:
            token.special = True
        add_bos = config.get("add_bos_token")
        return SpecialTokens(
            {name: token.content for name, token in named.items()},
            _added(added, where) if added is not None else _legacy_added(folder / _ADDED, special),
            tuple(special),
            add_bos if isinstance(add_bos, bool) else None,
        )

    def add_to(self, backend: tokenizers.Tokenizer, where: Path) -> None:
        """Add the missing tokens to a tokenizer and mark special tokens as special. `where`: path for the log."""
        backend.add_tokens([token for _, token in sorted(self.added.items(), key=lambda entry: entry[0])])
        backend.add_special_tokens(list(self.special))
        for token_id, token in self.added.items():
            if token.content and (found := backend.token_to_id(token.content)) != token_id:
                # As in transformers: a vocabulary has no gaps, so the token gets the next free id.
                _log.warning("%s: token %r should have id %d but has id %s", where, token.content, token_id, found)


def _own_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens with names beyond NAMES (boi_token). Keys such as `add_bos_token` are not strings."""
    return {
        name: text
        for name, text in config.items()
        if name.endswith("_token") and name not in NAMES and isinstance(text, str)
    }


def _token(value: object, where: Path, key: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, normalized=False, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if type(value.get(flag)) is bool})
    raise CheckpointError(f"{where}: {key} = {value!r:.80}: must be a string, or an object with a string as content")


def _added(declared: object, where: Path) -> dict[int, AddedToken]:
    if not isinstance(declared, dict) or not all(key.isdecimal() and len(key) < 10 for key in declared):
        raise CheckpointError(f"{where}: added_tokens_decoder = {declared!r:.80}: must be an object of tokens by id")
    return {int(key): _token(value, where, f"added_tokens_decoder.{key}") for key, value in declared.items()}


def _legacy_added(path: Path, special: list[AddedToken]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json (ids by text) by id."""
    known = {token.content for token in special}
    found: dict[int, AddedToken] = {}
    for text, token_id in read_optional(path).items():
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"{path}: {text!r:.80} = {token_id!r:.80}: must be a token id")
        found[token_id] = AddedToken(text, normalized=text not in known, special=text in known)
    return found
