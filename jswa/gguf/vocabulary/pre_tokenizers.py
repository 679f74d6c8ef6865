"""How byte-level vocabularies split text, by the name that llama.cpp gives it in `tokenizer.ggml.pre`.

The entries are those of the families' own tokenizer.json, which llama.cpp's expressions approximate. Only afmoe,
hunyuan-dense, laguna, mellum2 and seed-coder are as llama.cpp has them.
"""

from typing import Any, NamedTuple

Part = dict[str, Any]


def _split(expression: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> Part:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


class PreTokenizer(NamedTuple):
    """How text is prepared for merges.

    Attributes:
        parts: objects of tokenizer.json that split text one after another; the last writes bytes as characters.
        normalizer: an object of tokenizer.json, or None.
        ignore_merges: a word that is a token is not built by merges.
        add_bos: prompts begin with BOS if the file does not say whether they do.
    """

    parts: tuple[Part, ...]
    normalizer: Part | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_NFC: Part = {"type": "NFC"}
_BYTES, _WORDS = _bytes(use_regex=False), _bytes(use_regex=True)  # _WORDS also splits words as GPT-2 does
_DIGITS: Part = {"type": "Digits", "individual_digits": True}

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English endings
_END = r"|\s+(?!\S)|\s+"


def _cl100k(numbers: str) -> Part:
    """Split as cl100k of tiktoken does, but for the numbers given."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return _split(rf"{_SHORT}|{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_END}")


def _o200k(numbers: str, endings: str) -> Part:
    """Split as o200k of tiktoken does, but for the numbers and endings given."""
    before, small, large = r"[^\r\n\p{L}\p{N}]?", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
    words = f"{before}[{large}]*[{small}]+{endings}|{before}[{large}]+[{small}]*{endings}"
    return _split(rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+{_END}")


_UP_TO_THREE, _ONE = r"\p{N}{1,3}", r"\p{N}"
_LLAMA3 = PreTokenizer((_cl100k(_UP_TO_THREE), _BYTES), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_o200k(_UP_TO_THREE, f"{_SHORT}?"), _BYTES), ignore_merges=True)
_QWEN2 = PreTokenizer((_cl100k(_ONE), _BYTES), _NFC)
_CODE = PreTokenizer((_DIGITS, _WORDS))
_DEEPSEEK3_WORDS = _split(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+{_END}"
)
_DEEPSEEK3 = (_split(_UP_TO_THREE), _split("[一-龥\u3040-ゟ゠-ヿ]+"), _DEEPSEEK3_WORDS, _BYTES)
# Digits in threes from the last; scripts of East and South-East Asia.
_AFMOE = (
    _split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"),
    _split(
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
    ),
    _DEEPSEEK3_WORDS,
    _BYTES,
)
# Words with one space between them stay together, for merges that cross them.
_EXAONE_MOE = _split(
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_ONE}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_END}"
)
# A run of symbols has no line ends, and white space that ends in one stays together.
_SEED_CODER = _split(rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_ONE}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+{_END}")
_GLM4 = PreTokenizer((_cl100k(_UP_TO_THREE), _BYTES), ignore_merges=True)
PRE_TOKENIZERS = {
    "afmoe": PreTokenizer(_AFMOE),
    "chatglm-bpe": _GLM4,
    "command-r": PreTokenizer((_DIGITS, _WORDS), _NFC),
    "dbrx": PreTokenizer((_cl100k(_UP_TO_THREE), _BYTES)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "exaone-moe": PreTokenizer((_EXAONE_MOE, _BYTES), _NFC),
    "exaone4": PreTokenizer((_WORDS,), _NFC),
    "glm4": _GLM4,
    "gpt-2": PreTokenizer((_WORDS,)),
    "gpt-4o": _GPT4O,
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "laguna": PreTokenizer((_split(r"[^\n]+|\n+"), _cl100k(_ONE), _BYTES)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT4O,
    "mellum2": _CODE,
    "olmo": PreTokenizer((_WORDS,), _NFC),
    "qwen2": _QWEN2,
    "refact": _CODE,
    "seed-coder": PreTokenizer((_SEED_CODER, _BYTES)),
    "smaug-bpe": _LLAMA3._replace(add_bos=False),
    "smollm": _CODE,
    "starcoder": _CODE,
    "tekken": PreTokenizer((_o200k(_ONE, ""), _BYTES), ignore_merges=True, add_bos=True),
}
