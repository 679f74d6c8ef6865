"""What compiled programs hold, read from their text."""

import re

_COLLECTIVE = re.compile(
    r"= \S.* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(program: str) -> list[list[str]]:
    """Kind and name scope of every collective operation of an optimised program."""
    found = []
    for line in program.splitlines():
        kind = _COLLECTIVE.search(line)
        if kind is not None:
            scope = re.search(r'op_name="([^"]*)"', line)
            found.append([kind[1], scope[1] if scope else ""])
    return found
