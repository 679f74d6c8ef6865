"""Calls that real chat templates write, read back: `python -m tests.families.round_trips [--only TEXT] [--out FILE]`.

Prints a table, a line for each template: the reader that jswa guesses, and how many kinds of turns it reads back, or
that tools are refused. FILE gets what was not read, with the text. Fails unless those are lost that
tests/support/text/lost.py names.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jswa.errors import InvalidPrompt
from jswa.text.answers.probe import settled_by
from jswa.text.answers.template import AnswerTemplate, compile_template, guessed_template, shipped, shipped_for
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from tests.families.material import templates
from tests.support.text.chat_templates import FAMILIES
from tests.support.text.kinds import KINDS
from tests.support.text.lost import OURS, REAL, UNREADABLE
from tests.support.text.round_trip import read_back, write


@dataclass(frozen=True)
class Row:
    """A chat template with the tokens that are read.

    Attributes:
        answers: None if tools are refused.
        known: the kinds that the template cannot write; None if there are too many to be named.
    """

    name: str
    reader: str
    template: ChatTemplate
    tokenizer: Tokenizer
    answers: AnswerTemplate | None
    known: frozenset[str] | None = frozenset()

    def lost(self) -> Mapping[str, str]:
        """Return each kind that is not read back, with what the template wrote and what was read."""
        found = {}
        for kind, turn in KINDS.items():
            try:
                written = write(self.template, turn)
            except InvalidPrompt as error:
                found[kind] = f"refused by the template: {str(error)[-200:]}"
                continue
            for tokens in {False, kind.startswith(("mark", "call"))}:
                if self.answers and (wrong := read_back(self.answers, self.tokenizer, turn, written, tokens=tokens)):
                    marks = ", marks are tokens" if tokens else ""
                    found[kind] = f"written: `{written.text[-600:]!r}`\n  * read{marks}: {wrong[:600]}"
        return found


def rows() -> Iterator[Row]:
    """Yield real templates, with marks as tokens and as texts, and then our own of tests/support."""
    for real in templates():
        name = shipped_for(real.source)
        for texts in (False, True) if real.has_texts else (False,):
            tokenizer = real.tokenizer(texts=texts)
            answers = None if name is None else settled_by(guessed_template(name, tokenizer), real.template.render)
            if answers is None or not answers.reads_calls:
                yield Row(real.name, name or "-", real.template, tokenizer, None)
                break
            known = None if real.name in UNREADABLE else REAL.get(real.name, frozenset())
            yield Row(real.name + ", marks as texts" * texts, name or "-", real.template, tokenizer, answers, known)
    for label, family in FAMILIES.items():
        answers = compile_template(shipped()[family.reader], family.tokenizer)
        known = OURS.get(label, frozenset())
        yield Row(f"(ours) {label}", family.reader, family.template, family.tokenizer, answers, known)


def main() -> int:
    """Print the table; return 1 if something is lost that need not be."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", default="", help="part of a template's name")
    options.add_argument("--out", type=Path, help="file for what was not read back")
    chosen = options.parse_args()
    lines, failures, wrong = [], [], 0
    for row in rows():
        if chosen.only not in row.name:
            continue
        if row.answers is None:
            lines.append(f"| {row.name} | {row.reader} | tools are refused | |")
        else:
            lost = row.lost()
            other = 0 if row.known is None else len(lost.keys() ^ row.known)
            wrong += other
            found = f"{len(KINDS) - len(lost)}/{len(KINDS)}"
            lines.append(f"| {row.name} | {row.reader} | {found} | {f'{other} WRONG' if other else ''} |")
            failures.append(f"\n## {row.name} ({row.reader})\n")
            failures += [f"* **{kind}**\n  * {about}" for kind, about in lost.items()]
        print(lines[-1], flush=True)
    if chosen.out is not None:
        chosen.out.write_text("\n".join([*lines, *failures]) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
