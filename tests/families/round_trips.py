"""Calls that real chat templates write, read back: `python -m tests.families.round_trips [--only TEXT] [--out FILE]`.

Prints a table, a line for each template: the reader that jswa chooses, and how many kinds of turns it reads back. FILE
gets what was not read, with the text. Fails if a template that has a reader has a kind that is not known to be lost.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from jswa.errors import InvalidPrompt
from jswa.text.answers.probe import settled_by
from jswa.text.answers.template import AnswerTemplate, guessed_template, shipped_for
from jswa.text.tokenizer import Tokenizer
from tests.families.lost import LOST
from tests.families.material import Real, templates
from tests.support.text.kinds import KINDS
from tests.support.text.round_trip import read_back, write


def main() -> int:
    """Print the table; return 1 if something is lost that need not be."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", default="", help="part of a template's name")
    options.add_argument("--out", type=Path, help="file for what was not read back")
    chosen = options.parse_args()
    lines, failures, wrong = [], [], 0
    for real in templates():
        if chosen.only not in real.name:
            continue
        name = shipped_for(real.source)
        for texts in (False, True) if real.has_texts else (False,):
            tokenizer = real.tokenizer(texts=texts)
            guess = None if name is None else guessed_template(name, tokenizer)
            answers = None if guess is None else settled_by(guess, real.template.render)
            if answers is None or not answers.reads_calls:
                lines.append(f"| {real.name} | {name or '-'} | tools are refused | |")
                print(lines[-1])
                break
            found = list(_lost(real, tokenizer, answers))
            new = [one for one in found if one[0] not in LOST.get(real.name, ())]
            wrong += len(new)
            label = f"{real.name}, marks as texts" if texts else real.name
            lines.append(f"| {label} | {name} | {len(KINDS) - len(found)}/{len(KINDS)} | {len(new)} new |")
            print(lines[-1], flush=True)
            failures.append(f"\n## {label} ({name})\n")
            failures += [f"* **{kind}**\n  * written: `{text!r}`\n  * read: {read}" for kind, text, read in found]
    if chosen.out is not None:
        chosen.out.write_text("\n".join([*lines, *failures]) + "\n", encoding="utf-8")
    return int(wrong > 0)


def _lost(real: Real, tokenizer: Tokenizer, answers: AnswerTemplate) -> Iterator[tuple[str, str, str]]:
    """Yield each kind that is not read back, with what the template wrote and what was read."""
    for kind, turn in KINDS.items():
        try:
            written = write(real.template, turn)
        except InvalidPrompt as error:
            yield kind, "", f"refused by the template: {str(error)[-200:]}"
            continue
        as_tokens = {False, kind.startswith(("mark", "call"))}
        for tokens in sorted(as_tokens):
            if wrong := read_back(answers, tokenizer, turn, written, tokens=tokens):
                yield kind, written.text[-600:], f"{'marks are tokens: ' if tokens else ''}{wrong[:600]}"
                break


if __name__ == "__main__":
    sys.exit(main())
