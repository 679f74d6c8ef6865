"""Options of an engine on a command line: --engine kernels=elementwise=mosaic max_num_seqs=64."""

import argparse
import json
from collections.abc import Sequence
from typing import Any


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add --engine to a parser."""
    parser.add_argument("--engine", nargs="+", default=[], metavar="NAME=VALUE", help="more options of the engine")


def engine_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options that `words` name. A value is JSON, or else a plain word."""
    found: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
