"""What chat templates cannot write, so that nobody can read it: docs/answers.md has the reasons."""

from collections.abc import Mapping

LOST: Mapping[str, frozenset[str]] = {}
