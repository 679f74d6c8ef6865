"""The nodes of a step's graph, by name scope, read from what XLA dumps of a compiled program. Imports no jax.

A node is a thunk that is no container: a kernel, a copy, a conditional. The branches of a conditional are nodes too,
since they are part of the graph whether they run or not. A call of cuBLAS is counted as one node, and may be more.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

CONTAINERS = ("kCommandBuffer", "kSequential")
UNNAMED = "no scope"
_LINE = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+)")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)\s+\}\s+thunk_kind: "(\w+)"')
_NAMED = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)
_TRITON = re.compile(r'custom_call_target="triton_kernel_call\w*".*?opaque = ("(?:[^"\\]|\\.)*")')


class Node(NamedTuple):
    """A node: its kind among XLA's thunks, the instruction that it runs, and the name scopes around it."""

    kind: str
    instruction: str
    scope: tuple[str, ...]

    @property
    def layer(self) -> str | None:
        """The scope of its layer; None outside of layers."""
        return next((part for part in self.scope if part.startswith("layer_")), None)

    @property
    def room(self) -> str:
        """The scope that it is counted in: its layer, or the outermost scope outside of layers."""
        return self.layer or next(iter(self.scope), UNNAMED)


def nodes_of(thunks: str, metadata: str, program: str) -> list[Node]:
    """Return the nodes of a program, in the order of the listing.

    XLA's passes make instructions without a name, such as copies that a branch needs: they have the scope of the node
    before them, the first of a branch that of the conditional.

    Raises ValueError if a thunk of the listing is of another kind in the metadata, or the listing has no nodes.

    Args:
        thunks: XLA's listing of thunks, after its passes over them.
        metadata: XLA's names of the instructions of these thunks.
        program: the text of the optimised program.
    """
    names = {int(number): (name, kind) for name, number, kind in _METADATA.findall(metadata)}
    scopes = {name: scope_of(operation) for name, operation in _NAMED.findall(program)}
    found: list[Node] = []
    before: dict[int, tuple[str, ...]] = {}  # the scope of the last node by its indent
    for indent, number, kind in _lines(thunks):
        if kind in CONTAINERS:
            continue
        name, own = names.get(number, ("", kind))
        if own != kind:
            raise ValueError(f"thunk {number} is {kind} in the listing, {own} in the metadata")
        before = {place: scope for place, scope in before.items() if place <= indent}
        around = before[max(before)] if before else ()
        before[indent] = scopes.get(name, around)
        found.append(Node(kind, name, before[indent]))
    if not found:
        raise ValueError(f"no thunks in a listing that begins with {thunks[:80]!r}")
    return found


def _lines(thunks: str) -> Iterator[tuple[int, int, str]]:
    """Yield indent, number and kind of each thunk of a listing."""
    for line in thunks.splitlines():
        found = _LINE.match(line)
        if found is not None:
            yield len(found["indent"]), int(found["id"]), found["kind"]


def scope_of(operation: str) -> tuple[str, ...]:
    """Return the name scopes of an operation such as jit(step)/layer_0/moe/jit(route)/dot: what no function names."""
    return tuple(part for part in operation.split("/")[:-1] if "(" not in part)


def by_room(nodes: list[Node]) -> dict[str, int]:
    """Return how many nodes each layer has, and each scope outside of layers."""
    return dict(Counter(node.room for node in nodes))


def triton_kernels(program: str) -> int:
    """Return how many different kernels of jax-triton a program calls: each is compiled when the program is loaded."""
    return len(set(_TRITON.findall(program)))


def arguments(program: str) -> int:
    """Return how many arrays a program is called with."""
    entry = re.search(r"^ENTRY .*?^\}", program, re.MULTILINE | re.DOTALL)
    return 0 if entry is None else len(re.findall(r" parameter\(\d+\)", entry[0]))
