"""What is said about errors that the user can mend: a line that cannot be read, or an option that cannot be had."""

import difflib
import re
from itertools import chain

from cyclopts import CycloptsError
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError

from jswa.commands.options.other_engines import hint
from jswa.errors import JswaError, is_out_of_memory, out_of_memory
from jswa.kernels import instead_of

_NEAR = 0.75  # below it, the nearest name rarely is what was meant


def said(error: Exception, command: str) -> str | None:
    """Return the line for an error that the user can mend; None if the error is a fault of jswa.

    Args:
        command: its words, as in `jswa bench serve`.
    """
    if isinstance(error, JswaError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, CycloptsError):
        return f"{_mistake(error)} Type `{command} --help` to see what there is."
    if is_out_of_memory(error):
        return out_of_memory(error)
    return None


def _mistake(error: CycloptsError) -> str:
    """Return sentences that say what is wrong, and what there is instead."""
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = list(chain.from_iterable(argument.names for argument in error.argument_collection if argument.parse))
        return f"Unknown option: {option}. {instead(option, names)}".strip()
    if isinstance(error, UnusedCliTokensError):
        return f"Arguments that the command does not take: {' '.join(error.unused_tokens or ())}."
    words = " ".join(str(error).split())
    return words if words.endswith((".", "?")) else f"{words}."


def instead(option: str, names: list[str]) -> str:
    """Return what there is instead of an unknown option: its newer name, another engine's name, or a near one.

    Args:
        option: as it was typed, with its hyphens.
        names: the names of the options that there are. A hint that names none of them is left out.
    """
    option = option.partition("=")[0]
    if (newer := instead_of(option.removeprefix("--").replace("-", "_"))) is not None:
        return f"{option} is now --{newer}."
    said = hint(option) or ""
    named = re.findall(r"(?<=\s)--[a-z-]+", said.partition(" ")[2].partition(" ")[2])
    if said and (not named or set(named) & set(names)):
        return said
    near = difflib.get_close_matches(option, names, n=1, cutoff=_NEAR)
    return f"Did you mean {near[0]}?" if near else ""
