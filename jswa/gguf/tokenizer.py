"""The tokenizer and the chat templates of a GGUF file, as the files of a checkpoint folder have them.

GGUF keeps a vocabulary and names how text is split; tokenizer.json says everything. What a file does not say is as the
families' own tokenizer.json has it:

* Added tokens are matched before text is normalized, in words and with the spaces around them. Only those of Phi-3 and
  PhiMoE take spaces after them.
* Tokens that the file marks as control tokens are special. The converter marks some so that the family does not.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jswa.errors import CheckpointError
from jswa.gguf.vocabulary.fields import Metadata, flag_of, refused, text_of
from jswa.gguf.vocabulary.merges import MERGES, Merge, listed_merges, scored_merges
from jswa.gguf.vocabulary.pre_tokenizers import PRE_TOKENIZERS, Part
from jswa.gguf.vocabulary.tokens import CONTROL, TOKENS, UNKNOWN, USER_DEFINED, Tokens, read_tokens

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_PREFIX, _TEMPLATE = "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template"
_NORMALIZERS = ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces")
_MOST_BYTES = 2**26  # of tokenizer.json: what the reader of folders accepts
_MARK = "\u2581"  # stands for a space in SentencePiece's tokens
_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
_NO_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # the special tokens of Phi-3 that take no spaces after them


class TokenizerFiles(NamedTuple):
    """Contents of two files of a checkpoint folder.

    Attributes:
        tokenizer: the text of tokenizer.json; it has all added tokens.
        config: the object of tokenizer_config.json: special tokens by name, each a text or an object with flags,
            `add_bos_token`, and `chat_template`.
    """

    tokenizer: str
    config: dict[str, Any]


def tokenizer_files(metadata: Mapping[str, object]) -> TokenizerFiles:
    """Return a GGUF file's tokenizer as files of a checkpoint folder.

    Args:
        metadata: the file's values by key: texts, integers, floats, truth values, and lists of them.

    Raises CheckpointError, which names the key, if a value is malformed, or if jswa does not know the kind of
    vocabulary or how it splits text.
    """
    model, pre = text_of(metadata, MODEL), text_of(metadata, PRE)
    if model == "llama":
        scheme = _sentencepiece(prefix=flag_of(metadata, _PREFIX) is not False)
    elif model == "gemma4" or (model == "gpt2" and pre == "gemma4"):
        scheme = _sentencepiece(prefix=False)._replace(add_bos=False)
    elif model == "gpt2":
        scheme = _byte_level(metadata, pre)
    else:
        raise refused(MODEL, model, "must be gpt2, llama or gemma4")
    for key in _NORMALIZERS:
        if metadata.get(key) not in (None, False):
            raise refused(key, metadata[key], "must be absent or false: jswa does not normalize text in this way")
    tokens = read_tokens(metadata, spaces_are_marks=scheme.spaces_are_marks)
    scored = model == "llama" and MERGES not in metadata
    merges = scored_merges(metadata, tokens) if scored else listed_merges(metadata, tokens)
    # The released tokenizer of Gemma 4 leaves BOS to the chat template, whatever the converter writes.
    bos = _added_id(metadata, tokens, "bos_token", scheme.add_bos) if model != "gemma4" else None
    eos = _added_id(metadata, tokens, "eos_token", default=False)
    spaces_after = model == "llama" and text_of(metadata, "general.architecture") in ("phi3", "phimoe")
    added = _added_tokens(tokens, spaces_after=spaces_after)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": scheme.normalizer,
        "pre_tokenizer": scheme.pre_tokenizer,
        "post_processor": _post_processor(tokens, bos, eos),
        "decoder": scheme.decoder,
        "model": _model(scheme, tokens, merges),
    }
    text = json.dumps(content, ensure_ascii=False)
    if (size := len(text.encode("utf-8"))) > _MOST_BYTES:
        raise CheckpointError(f"{TOKENS}, {MERGES}: make a tokenizer.json of {size} bytes, at most {_MOST_BYTES} fit")
    objects = {one["id"]: one for one in added if one["rstrip"]}  # a text would lose this flag
    named = {name: objects.get(token_id, tokens.texts[token_id]) for name, token_id in tokens.named.items()}
    return TokenizerFiles(text, {**named, "add_bos_token": bos is not None, **_chat_templates(metadata)})


class _Scheme(NamedTuple):
    """How text becomes the symbols that merges begin with, and tokens become text again: objects of tokenizer.json."""

    normalizer: Part | None
    pre_tokenizer: Part | None
    decoder: Part
    ignore_merges: bool
    add_bos: bool
    spaces_are_marks: bool
    has_unknown: bool


def _byte_level(metadata: Metadata, pre: str | None) -> _Scheme:
    found = PRE_TOKENIZERS.get(pre or "")
    if found is None:
        raise refused(PRE, pre, f"must be one of gemma4, {', '.join(PRE_TOKENIZERS)}")
    if flag_of(metadata, _PREFIX):
        raise refused(_PREFIX, True, f"must be false if {MODEL} is gpt2")
    parts = found.parts
    return _Scheme(
        normalizer=found.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(parts)} if len(parts) > 1 else parts[0],
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        ignore_merges=found.ignore_merges,
        add_bos=found.add_bos,
        spaces_are_marks=False,
        has_unknown=False,
    )


def _sentencepiece(*, prefix: bool) -> _Scheme:
    """Return the scheme of Llama 2 if texts get a space in front of them, and of Gemma otherwise."""
    marks: Part = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    decoders: list[Part] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        marks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _MARK}, marks]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _Scheme(
        normalizer=marks,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        ignore_merges=False,
        add_bos=True,
        spaces_are_marks=not prefix,
        has_unknown=True,
    )


def _model(scheme: _Scheme, tokens: Tokens, merges: list[Merge]) -> Part:
    unknown = tokens.named.get("unk_token")
    if scheme.has_unknown and unknown is None:
        raise refused("tokenizer.ggml.unknown_token_id", None, "must be the id of a token")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens.texts[unknown] if scheme.has_unknown and unknown is not None else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": scheme.has_unknown,
        "byte_fallback": scheme.has_unknown,
        "ignore_merges": scheme.ignore_merges,
        "vocab": tokens.ids,
        "merges": merges,
    }


def _added_tokens(tokens: Tokens, *, spaces_after: bool) -> list[Part]:
    named = frozenset(tokens.named.values())
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": spaces_after and text not in _NO_SPACES,
            "normalized": False,
            "special": tokens.kinds[token_id] != USER_DEFINED,
        }
        for text, token_id in tokens.ids.items()
        if tokens.kinds[token_id] in _ADDED or token_id in named
    ]


def _added_id(metadata: Metadata, tokens: Tokens, name: str, default: bool) -> int | None:
    """Return the id of BOS or EOS if prompts get it."""
    key, token_id = f"tokenizer.ggml.add_{name}", tokens.named.get(name)
    stated = flag_of(metadata, key)
    if stated and token_id is None:
        raise refused(key, stated, f"needs tokenizer.ggml.{name}_id")
    return token_id if (default if stated is None else stated) else None


def _post_processor(tokens: Tokens, bos: int | None, eos: int | None) -> Part | None:
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[Part]:
        def special(token_id: int | None) -> list[Part]:
            if token_id is None:
                return []
            return [{"SpecialToken": {"id": tokens.texts[token_id], "type_id": type_id}}]

        return [*special(bos), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(eos)]

    names = {tokens.texts[token_id]: token_id for token_id in (bos, eos) if token_id is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text: {"id": text, "ids": [found], "tokens": [text]} for text, found in names.items()},
    }


def _chat_templates(metadata: Metadata) -> dict[str, Any]:
    """Return `chat_template` as tokenizer_config.json has it: one text, or a list if there are named ones."""
    names = [key for key in metadata if key.startswith(f"{_TEMPLATE}.")]
    found = {key.removeprefix(f"{_TEMPLATE}."): text_of(metadata, key) for key in names}
    default = text_of(metadata, _TEMPLATE)
    if not found:
        return {} if default is None else {"chat_template": default}
    templates = {**({} if default is None else {"default": default}), **found}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}
