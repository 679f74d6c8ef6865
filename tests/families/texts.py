"""Texts that tokenizers may split in unusual ways, drawn at random."""

import random
from collections.abc import Callable, Iterator, Sequence

_SCRIPTS = (
    *("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "äöüßéèñçøåœæ", "ǅǈʰˠ", "ΑΒΓ", "αβγδεζηθ"),
    *(
        "абвгдежзийклмн",
        "אבגדהוז",
        "ابتثجحخد",
        "हिन्दीकखगघ",
        "กขคงจฉช",
        "日本語漢字中文",
        "ひらがなカタカナ",
        "한국어가나다",
    ),
    *("ⅣⅧ½²³", "٠١٢٣"),
)
_MARKS = ("\u0301", "\u0308", "\u200d", "\ufe0f", "\u1161", "\u0e34", "\u093f")
_EMOJI = ("🦙", "👩‍👩‍👧", "🏳️‍🌈", "😶‍🌫️", "❤", "🇩🇪", "👍🏽")
_CODE = (
    *("def f(x):\n\treturn x+1\n", "for (int i=0;i<n;++i) {", "</div>", "==!=<=>=&&||", "::std", "\\d+\\.\\w*"),
    *("%s\r\n", "#include"),
)
_ENDINGS = ("'s", "'T", "'re", "'LL", "’s", "'d", "n't")
_SPACES = ("\r\n", " \n", "\n ", "\t ", "  \n\n")
_STRANGE = (
    *("\ufffd", "\x00", "\x07", "\x1b[0m", "\x7f", "\u2028", "\u00a0", "\u3000", "\u2581", "\u2581\u2581", "\ufeff"),
    *("𝕬𝖇", "\U0010ffff"),
)
_SIGNS = "!?.,:;-_=+*/\\()[]{}<>@#$%^&|~`\"'"


def texts(special: Sequence[str], seed: int, count: int) -> Iterator[str]:
    """Yield texts of many scripts, code, digits, runs of spaces, strange characters and `special` tokens."""
    draw = random.Random(seed)
    pick = draw.choice

    def word() -> str:
        letters = pick(_SCRIPTS)
        return "".join(pick(letters) for _ in range(draw.randint(1, 9)))

    kinds: list[Callable[[], str]] = [
        *(word, word, word, lambda: word().capitalize()),
        *(lambda: word() + pick(_ENDINGS), lambda: word() + pick(_MARKS), lambda: pick(_EMOJI), lambda: pick(_CODE)),
        lambda: str(draw.randrange(10 ** draw.randint(1, 9))),
        lambda: pick(" \t\n\r") * draw.randint(1, 40),
        lambda: pick(_SPACES) * draw.randint(1, 4),
        lambda: pick(_SIGNS) * draw.randint(1, 5),
        lambda: chr(pick((draw.randrange(0x20, 0xD800), draw.randrange(0xE000, 0x10FFFF)))),
        *(lambda: pick(_STRANGE), lambda: pick(special), lambda: pick(special)[:-1]),
    ]
    for _ in range(count):
        yield "".join(pick(kinds)() + pick(("", " ", " ")) for _ in range(draw.randint(1, 12)))
