"""A report of habits that make the pages and help texts hard to read: `python -m tools.prose [WORD]`.

It prints file:line, the habit and the sentence, then how often each habit was found. WORD shows files with it in their
path only. It is a report and no gate: some of these sentences are right as they are.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/**/*.md")
HISTORY = ROOT / "docs" / "log.md"  # is not written anew
HELP = ("jswa/config.py", "server/options.py", "jswa/commands/cli.py", "server/core/metrics.py")
MOST_WORDS = 900  # of a page
LONGEST = 35  # words of a sentence
HABITS = {
    "behind": r"\bbehind\b(?! (?:(?:a|an|the|another) )?(?:load balancer|proxy|reverse proxy|router|ray)\b)",
    "those that": r"\bthose (?:that|which|whose)\b",
    "what": r"(?:^|[,;:.(] |\b(?:but|by|for|from|if|in|of|than|to|with) )what\b(?!$|.*\?$)|\bthat which\b",
    "so many": r"\bso many\b",
    "of which": r"\bof which\b",
    "alone": r"\balone\b",
    "other": r"\b(?:anew|by turns|but for|nobody|no ?one)\b",
}
_HABITS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in HABITS.items()}
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”*]*\s+(?=[(\"“*`\[A-Z0-9]|(?:jswa|jax|vLLM|auto|none|[a-z]+\d\w*)\b)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|al)\.$")
_NEW_BLOCK = re.compile(r"\s*(?:[*+-]|\d+\.|#+|>) ")
_MESSAGE = re.compile(r"[A-Z1].* .*[.]")  # a help text among the strings of a module


class Sentence(NamedTuple):
    """A sentence as it is read, and the line of its file, from 1, in which it begins."""

    line: int
    text: str


def pages() -> list[Path]:
    """Return the pages that are read."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern) if path != HISTORY)


def of_page(text: str) -> Iterator[Sentence]:
    """Yield the sentences of Markdown: of paragraphs, items, titles and cells of tables, without blocks of code."""
    block: list[tuple[int, str]] = []
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        if fence or code or not line.strip() or _NEW_BLOCK.match(line) or line.startswith(("|", "<!--", "    ")):
            yield from _sentences(block)
            block = []
        code ^= fence
        if fence or code or line.startswith(("<!--", "    ")) or re.fullmatch(r"[|\s:-]*", line):
            continue
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield from _sentences([(number, cell)])
        elif line.startswith("#"):
            yield from _sentences([(number, line)])
        else:
            block.append((number, line))
    yield from _sentences(block)


def of_help(source: str) -> Iterator[Sentence]:
    """Yield the sentences of help texts: docstrings of public classes and functions, and messages among strings."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in docstrings or not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str) and _MESSAGE.fullmatch(node.value):
            yield from _sentences([(node.lineno, node.value)])
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            first = node.body[0]
            text = ast.get_docstring(node, clean=False) or ""
            block: list[tuple[int, str]] = []
            for number, line in enumerate(text.splitlines(), first.lineno):
                named = re.match(r"\s*\w+: (?=\S)", line)
                is_head = re.fullmatch(r"\s*(?:\w+|-+|Args:|Attributes:)", line) is not None  # numpydoc's too
                if named or not line.strip() or is_head:
                    yield from _sentences(block)
                    block = []
                if not is_head:
                    block.append((number, line[named.end() :] if named else line))
            yield from _sentences(block)


def _sentences(block: list[tuple[int, str]]) -> Iterator[Sentence]:
    """Yield the sentences of one piece of text, given by its numbered lines."""
    text, starts = "", []
    for number, line in block:
        shown = re.sub(r"^\s*(?:[*+-]|\d+\.|#+|>) ", "", line.strip())
        starts.append((len(text), number))
        text += shown + " "
    begin = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        if end < len(text) and _ABBREVIATION.search(text[:end].strip()):
            continue
        sentence = text[begin:end].strip()
        if re.search(r"\w", sentence):
            yield Sentence(max(number for at, number in starts if at <= begin), sentence)
        begin = end


def plain(sentence: str) -> str:
    """Return a sentence as it is heard: links are their texts, and code is one word."""
    sentence = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return re.sub(r"`+[^`]*`+", "code", sentence)


def words(sentence: str) -> int:
    """Count the words of a sentence; signs without a letter or digit are none."""
    return sum(bool(re.search(r"\w", word)) for word in plain(sentence).split())


def habits(sentence: str) -> list[str]:
    """Return the habits of a sentence, a name for each time that it is found."""
    heard = plain(sentence)
    found = [name for name, pattern in _HABITS.items() for _ in pattern.finditer(heard)]
    return found + ["long sentence"] * (words(sentence) > LONGEST)


def main(only: str = "") -> None:
    """Print the report of all pages and help texts whose path contains `only`."""
    counts: Counter[str] = Counter()
    for path in [*pages(), *(ROOT / name for name in HELP)]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if only not in name:
            continue
        size = len(text.split())
        if path.suffix == ".md" and size > MOST_WORDS:
            print(f"{name}: long page: {size} words")
            counts["long page"] += 1
        for line, sentence in of_page(text) if path.suffix == ".md" else of_help(text):
            found = habits(sentence)
            counts.update(found)
            if found:
                print(f"{name}:{line}: {', '.join(found)}: {sentence}")
    print("\n" + "\n".join(f"{count:5} {habit}" for habit, count in counts.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:2])
