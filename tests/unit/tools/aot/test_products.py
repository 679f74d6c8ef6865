"""Tests of the check of writes to registers of products (WGMMA) that are under way."""

import pytest

from tools.aot.measures.products import overwritten

PRODUCT = (
    "{{ setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{sums}}}, {{{left}}}, %rd1, p; }}\n"
)
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;\n", "wgmma.wait_group.sync.aligned {};\n"


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ("mul.rn.bf16x2 %r5, %r1, %r2;\n", 0),  # reads
        ("mul.rn.bf16x2 %r1, %r5, %r2;\n", 1),
        ("@%p1 mov.b64 {%r9, %r2}, %rd4;\n", 1),
        ("add.f32 %f1, %f1, %f1;\n", 1),
        (WAIT.format(1) + "mov.b32 %r1, 0;\n", 1),
        (WAIT.format(0) + "mov.b32 %r1, 0;\n", 0),
        ("{second}" + WAIT.format(1) + "mov.b32 %r1, 0;\n", 0),
        ("{second}" + WAIT.format(1) + "mov.b32 %r3, 0;\n", 1),
    ],
)
def test_writes_to_registers_of_products_under_way_are_counted(between: str, found: int) -> None:
    """A wait for one leaves the last group under way alone."""
    first = PRODUCT.format(sums="%f1,%f2", left="%r1,%r2") + COMMIT
    second = PRODUCT.format(sums="%f3,%f4", left="%r3,%r4") + COMMIT
    assert overwritten(first + between.replace("{second}", second) + WAIT.format(0) + "mov.b32 %r1, 0;\n") == found


ONE = PRODUCT.format(sums="%f1,%f2", left="%r1,%r2") + COMMIT
WRITE = "mov.b32 %r1, 0;\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        # A loop hands a product to its next turn, and its end waits for it before it leaves the loop.
        (f"$L__BB0_1:\n{WAIT.format(0)}@%p1 bra $L__BB0_2;\n{ONE}bra.uni $L__BB0_1;\n$L__BB0_2:\n{WRITE}ret;\n", 0),
        (f"$L__BB0_1:\n@%p1 bra $L__BB0_2;\n{ONE}bra.uni $L__BB0_1;\n$L__BB0_2:\n{WRITE}ret;\n", 1),
        # What a loop leaves under way is written at the beginning of its next turn.
        (f"$L__BB0_1:\n{WRITE}{WAIT.format(0)}{ONE}@%p1 bra $L__BB0_1;\nret;\n", 1),
        (f"$L__BB0_1:\n{WAIT.format(0)}{WRITE}{ONE}@%p1 bra $L__BB0_1;\nret;\n", 0),
        # One of two paths waits.
        (f"{ONE}@%p1 bra $L__BB0_1;\n{WAIT.format(0)}$L__BB0_1:\n{WRITE}", 1),
        (f"{ONE}@%p1 bra $L__BB0_1;\n{WAIT.format(0)}{WRITE}ret;\n$L__BB0_1:\nret;\n", 0),
        # A wait for the newest group alone, with another group below it on one of the paths.
        (f"@%p1 bra $L__BB0_1;\n{ONE}$L__BB0_1:\n{COMMIT}{WAIT.format(1)}{WRITE}", 0),
        (f"@%p1 bra $L__BB0_1;\n{ONE}$L__BB0_1:\n{COMMIT}{WAIT.format(2)}{WRITE}", 1),
        # More groups than are kept apart.
        (f"{ONE}{COMMIT * 20}{WAIT.format(9)}{WRITE}", 1),
        (f"{ONE}{COMMIT * 20}{WAIT.format(1)}{WRITE}", 0),
        # A loop inside of inline assembly, as of a wait for a barrier, has labels of its own.
        (f"{ONE}{{\nLAB_WAIT:\n@P1 bra.uni DONE;\nbra.uni LAB_WAIT;\nDONE:\n}}\n{WRITE}", 1),
        # No path leads to the write.
        (f"{ONE}ret;\n{WRITE}", 0),
    ],
)
def test_all_paths_are_followed(source: str, found: int) -> None:
    """A kernel's blocks stand in any order, so the order of the text says nothing of what runs before."""
    assert overwritten(source) == found
