"""Writes to registers of matrix products (WGMMA) that are under way, along all paths through a kernel's PTX."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Groups that are kept apart. A kernel with more under way has its oldest ones counted as one.
_MOST_GROUPS = 8
_LABEL = re.compile(r"\s*(\$L__BB\w+):")
_BRANCH = re.compile(r"\s*(@\S+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+)")
_RETURN = re.compile(r"\s*(@\S+\s+)?(?:ret|exit|trap);")
_PRODUCT = re.compile(r"wgmma\.mma_async\S* (\{[^}]*\}), (\{[^}]*\})?")
_WAIT = re.compile(r"wgmma\.wait_group\S* (\d+)")
_WRITE = re.compile(r"\s*(?:@\S+ )?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")
_REGISTER = re.compile(r"%\w+")


@dataclass(frozen=True)
class UnderWay:
    """Registers that products under way may read or write.

    Attributes:
        groups: of each committed group, oldest first.
        open: of the products behind the last commit.
    """

    groups: tuple[frozenset[str], ...] = ()
    open: frozenset[str] = frozenset()

    @property
    def registers(self) -> frozenset[str]:
        """All of them."""
        return self.open.union(*self.groups)

    def behind(self, line: str) -> "UnderWay":
        """Return the products under way behind an instruction."""
        if product := _PRODUCT.search(line):
            return UnderWay(self.groups, self.open.union(_REGISTER.findall(product[0])))
        if "wgmma.commit_group" in line:
            groups = (*self.groups, self.open)
            first = len(groups) - _MOST_GROUPS + 1
            return UnderWay(groups if first <= 1 else (frozenset().union(*groups[:first]), *groups[first:]))
        if wait := _WAIT.search(line):
            return UnderWay(self.groups[max(0, len(self.groups) - int(wait[1])) :], self.open)
        return self

    def joined(self, other: "UnderWay") -> "UnderWay":
        """Return the products that are under way on either of two paths. A wait counts groups from the newest back."""
        short, long = sorted((self.groups, other.groups), key=len)
        older = len(long) - len(short)
        shared = tuple(one | another for one, another in zip(short, long[older:], strict=True))
        return UnderWay(long[:older] + shared, self.open | other.open)


@dataclass
class _Block:
    """Instructions that run one after the other, and the blocks that may run behind them."""

    lines: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def overwritten(source: str) -> int:
    """Return how many instructions of a kernel's PTX write registers that a product under way may still read.

    A WGMMA reads its left operand, and reads and writes its sums, until a wait leaves no more groups under way than
    came after its own. Every path is followed, loops until nothing changes: data flow as in compilers.
    """
    blocks = _blocks(source.splitlines())
    first = next(iter(blocks))
    entries = {first: UnderWay()}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        state = entries[name]
        for line in blocks[name].lines:
            state = state.behind(line)
        for target in blocks[name].targets:
            joined = entries[target].joined(state) if target in entries else state
            if entries.get(target) != joined:
                entries[target] = joined
                waiting.append(target)
    return sum(_writes(blocks[name].lines, state) for name, state in entries.items())


def _writes(lines: Iterable[str], state: UnderWay) -> int:
    """Return how many instructions of a block write registers of products under way."""
    found = 0
    for line in lines:
        product = any(word in line for word in ("wgmma.mma_async", "wgmma.commit_group", "wgmma.wait_group"))
        if not product and (written := _WRITE.match(line)):
            found += not state.registers.isdisjoint(_REGISTER.findall(written[1]))
        state = state.behind(line)
    return found


def _blocks(lines: Iterable[str]) -> dict[str, _Block]:
    """Return the blocks of a kernel by label, the first one first. Loops within inline assembly are part of a block."""
    name = "entry"
    block = _Block()
    blocks = {name: block}
    runs_on = True
    for line in lines:
        label, branch, end = _LABEL.match(line), _BRANCH.match(line), _RETURN.match(line)
        if label or not runs_on or (branch is None and block.targets):
            following = label[1] if label else f"behind {name}"
            if runs_on:
                block.targets.append(following)
            name, block, runs_on = following, _Block(), True
            blocks[name] = block
        if branch:
            block.targets.append(branch[2])
            runs_on = branch[1] is not None
        elif end:
            runs_on = end[1] is not None
        else:
            block.lines.append(line)
    return blocks
