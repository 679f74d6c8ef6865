"""How --help is printed: groups of options, each with its name on one line and its text beside it."""

import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cyclopts import App

from jswa.commands.options.groups import PLAIN, SIZES

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console

SHORT, ALL = "--help", "--help-all"
MORE = "--help-all shows all options, with their whole texts."
_COLUMN = 32  # where texts begin
_LEAST = 20  # columns for texts, on however narrow a terminal
_CLAUSE = re.compile(r'(.*?[^"])[.;:](?= |$)')
# Options of the engine and the server that --help shows; --help-all shows the others too.
COMMON = {
    "--quantization", "--max-model-len", "--lora-modules", "--gpu-memory-utilization", "--kv-cache-dtype",
    "--max-num-seqs", "--max-num-batched-tokens", "--tensor-parallel-size",
    "--speculative-config", "--host", "--port", "--served-model-name", "--chat-template", "--api-key", "--log-level",
}  # fmt: skip


class Printed(NamedTuple):
    """A formatter of cyclopts.

    Attributes:
        whole: print all options and their whole texts; else the first clause of each.
        long_groups: titles of the groups of which a short help shows only the options of COMMON.
    """

    whole: bool
    long_groups: Collection[str]

    def __call__(self, console: "Console", options: object, panel: "HelpPanel") -> None:
        """Print a group, with its title if it has an option to show."""
        title = _plain(console, panel.title)
        entries = [entry for entry in panel.entries if not {SHORT, "--version"} & set(entry.names)]
        if not self.whole and title in self.long_groups:
            entries = [entry for entry in entries if COMMON & set(entry.names)]
        if not entries:
            return
        lines = [line for entry in entries for line in _rows(entry, self._text(console, entry), console.width)]
        console.out(f"{title}:", *lines, *([""] if self.whole else []), sep="\n", highlight=False)

    def render_usage(self, console: "Console", options: object, usage: Any) -> None:
        """Print how the command is written."""
        console.out(f"Usage: {_plain(console, usage).removeprefix('Usage: ')}\n", highlight=False)

    def _text(self, console: "Console", entry: "HelpEntry") -> str:
        text = _plain(console, entry.description)
        if not self.whole and (first := _CLAUSE.match(text)):
            text = f"{first[1]}."
        choices = f" [choices: {', '.join(entry.choices)}]" if entry.choices else ""
        default = f" [default: {entry.default}]" if entry.default is not None else ""
        return f"{text}{choices}{default}{' [required]' if entry.required else ''}".strip()


def parser_of(name: str, command: Callable[..., object], usage: str | None = None) -> App:
    """Return the parser of a command with options of its own, such as `jswa serve`."""
    app = App(
        name=name,
        usage=usage,
        version_flags=[],
        help_format="plaintext",
        help_epilogue=f"{SIZES}\n\n{MORE}",
        default_parameter=PLAIN,
    )
    app.default(command)
    return app


def formatter(arguments: list[str], long_groups: Collection[str]) -> tuple[list[str], Printed]:
    """Return the arguments with --help for --help-all, and the formatter for what is asked."""
    return [SHORT if word == ALL else word for word in arguments], Printed(ALL in arguments, long_groups)


def _plain(console: "Console", text: Any) -> str:
    with console.capture() as captured:
        console.print(text or "", width=100_000, style=None, markup=False, highlight=False, soft_wrap=True, end="")
    return " ".join(captured.get().split())


def _rows(entry: "HelpEntry", text: str, width: int) -> Iterator[str]:
    """Yield the lines of an option. A name that is longer than its column has a line of its own."""
    name = "  " + ", ".join(entry.display_labels_with_metavar)
    beside = textwrap.wrap(text, max(_LEAST, width - _COLUMN), break_long_words=False, break_on_hyphens=False)
    if len(name) + 2 > _COLUMN:
        yield name
        name = ""
    for line in beside or [""]:
        yield f"{name:<{_COLUMN}}{line}".rstrip()
        name = ""
