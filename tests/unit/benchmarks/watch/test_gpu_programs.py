"""Nodes are counted in XLA's list of thunks, as `tools.aot.device.thunks` gives it."""

from benchmarks.watch.gpu_programs import nodes

THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source | next=002 (1)] loop_fusion grid: [1, 1, 1]
    002: kCustomCall   [prev=001 (1) | next=003 (1)] kCustomCall
    003: kConditional  [prev=002 (1) | next=006 (1)] kConditional
        004: kCustomKernel [source | sink] sort grid: [1, 1, 1]
        005: kConditional [source | sink] kConditional
            006: kCopy [source | sink]
    007: kCopy [prev=003 (1) | sink]
"""


def test_nodes_are_kernels_and_copies_in_branches_and_outside() -> None:
    assert nodes(THUNKS) == (5, 3)


def test_a_program_without_a_graph_has_nodes_too() -> None:
    found = nodes("000: kCustomKernel a\n001: kConditional\n    002: kCopy b\n003: kWhile\n    004: kCustomKernel c\n")
    assert found == (3, 2)
