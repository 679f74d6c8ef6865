"""Tests of the nodes that `tools.aot.graph` reads from XLA's dumps, of the calls of ptxas, and of its gate."""

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tools.aot import graph
from tools.aot.graph import Graph
from tools.aot.measures import ptxas
from tools.aot.measures.nodes import Node, arguments, by_room, nodes_of, triton_kernels

THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] fusion_1 grid: [1, 1, 1] threads: [64, 1, 1]
    002: kCustomCall   [prev=001 (1) | next=003 (1)] kCustomCall
    003: kCopy         [prev=002 (1) | next=007 (1)] kCopy
    007: kConditional  [prev=003 (1) | next=008 (1)]
      branch_0:
        004: kCopy         [source | sink] kCopy
      branch_1:
        006: kConditional  [source | sink]
          false_branch:
            005: kCustomKernel [source | sink] fusion_2 grid: [1, 1, 1] threads: [64, 1, 1]
          true_branch:
            No thunks.
    008: kCustomKernel [prev=007 (1) | sink] fusion_3 grid: [1, 1, 1] threads: [64, 1, 1]
"""
NAMES = {
    1: ("kCustomKernel", "fusion.1"),
    2: ("kCustomCall", "call.1"),
    3: ("kCopy", "copy.1"),
    4: ("kCopy", "copy.2"),
    5: ("kCustomKernel", "fusion.2"),
    6: ("kConditional", "conditional.1"),
    7: ("kConditional", "conditional.2"),
    8: ("kCustomKernel", "fusion.3"),
}
PROGRAM = """\
ENTRY %main (a: s32[4], b: f32[2]) -> f32[2] {
  %a = s32[4]{0} parameter(0)
  %b = f32[2]{0} parameter(1)
  %fusion.1 = s32[4]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(step)/indices/jit(_where)/select_n"}
  %call.1 = f32[2] custom-call(%b), custom_call_target="triton_kernel_call_ffi", metadata={op_name="{moe}"}, \
backend_config={opaque = "ab\\"c"}
  %call.2 = f32[2] custom-call(%b), custom_call_target="triton_kernel_call_ffi", metadata={op_name="{moe}"}, \
backend_config={opaque = "ab\\"c"}
  %call.3 = f32[2] custom-call(%b), custom_call_target="triton_kernel_call_ffi", metadata={op_name="{moe}"}, \
backend_config={opaque = "ab\\"d"}
  %conditional.2 = f32[2]{0} conditional(%a, %b), metadata={op_name="jit(step)/sampling/cond"}
  %conditional.1 = f32[2]{0} conditional(%a, %b), metadata={op_name="jit(step)/layer_0/sampling/cond"}
  ROOT %fusion.3 = f32[2]{0} fusion(%b), kind=kLoop, metadata={op_name="jit(step)/gather"}
}
""".replace("{moe}", "jit(step)/layer_0/moe/call")
STEP = Graph("a model, 2 layers", {"layer_0": 13, "layer_1": 11, "indices": 32, "sampling": 6, "logprobs": 2}, 70, 10)


def metadata(names: dict[int, tuple[str, str]]) -> str:
    """Return what XLA dumps of these thunks."""
    return (
        'thunk_metadata {\n  thunk_info {\n    profile_annotation: "c"\n  }\n  thunk_kind: "kCommandBuffer"\n}\n'
        + "".join(
            f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n'
            f'  thunk_kind: "{kind}"\n}}\n'
            for number, (kind, name) in names.items()
        )
    )


def test_all_nodes_are_counted_where_they_belong() -> None:
    """Both branches too; a copy without a name belongs to what stands before it, or to the conditional around it."""
    found = nodes_of(THUNKS, metadata(NAMES), PROGRAM)
    assert found == [
        Node("kCustomKernel", "fusion.1", ("indices",)),
        Node("kCustomCall", "call.1", ("layer_0", "moe")),
        Node("kCopy", "copy.1", ("layer_0", "moe")),
        Node("kConditional", "conditional.2", ("sampling",)),
        Node("kCopy", "copy.2", ("sampling",)),
        Node("kConditional", "conditional.1", ("layer_0", "sampling")),
        Node("kCustomKernel", "fusion.2", ("layer_0", "sampling")),
        Node("kCustomKernel", "fusion.3", ()),
    ]
    assert by_room(found) == {"indices": 1, "layer_0": 4, "sampling": 2, "no scope": 1}


def test_dumps_of_another_form_are_an_error() -> None:
    """They must not be taken for a graph without nodes."""
    with pytest.raises(ValueError, match="thunk 2 is kCustomCall in the listing, kGemm in the metadata"):
        nodes_of(THUNKS, metadata({**NAMES, 2: ("kGemm", "call.1")}), PROGRAM)
    with pytest.raises(ValueError, match="no thunks in a listing that begins with 'nothing'"):
        nodes_of("nothing", metadata(NAMES), PROGRAM)


def test_different_kernels_on_triton_and_arguments_are_counted() -> None:
    """The calls of all layers are one kernel, if they are equal."""
    assert triton_kernels(PROGRAM) == 2
    assert arguments(PROGRAM) == 2


def test_a_step_within_the_gate_has_no_faults() -> None:
    """At its limits."""
    assert STEP.layers == [13, 11]
    assert STEP.outside == {"indices": 32, "sampling": 6, "logprobs": 2}
    assert not STEP.faults()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"rooms": {**STEP.rooms, "layer_1": 12}}, "25 nodes in 2 layers: at most 24"),
        ({"rooms": {**STEP.rooms, "sampling": 7}}, "41 nodes outside of layers: at most 40"),
        ({"calls": 71}, "81 calls of ptxas: at most 80"),
        ({"loaded": 11}, "81 calls of ptxas: at most 80"),
    ],
)
def test_a_step_past_the_gate_has_a_fault(change: dict[str, Any], found: str) -> None:
    """The line names the step, the number and the limit."""
    worse = STEP._replace(**change)
    assert worse.faults() == [f"a model, 2 layers: {found}"]


def test_without_the_sampler_the_others_have_their_own_limit() -> None:
    """The sampler's eight nodes are not theirs to take."""
    bad = STEP._replace(calls=500, rooms={**STEP.rooms, "sampling": 300})
    assert not bad.faults(sampler=False)
    more = bad._replace(rooms={**bad.rooms, "logits_state": 1})
    assert more.faults(sampler=False) == ["a model, 2 layers: 33 nodes outside of layers: at most 32"]


def test_the_command_fails_past_the_gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints nodes by scope, most first."""
    monkeypatch.setattr(ptxas, "counted", lambda: nullcontext(lambda: 0))
    monkeypatch.setattr(graph, "compiled", lambda model, layers, rows: STEP)
    monkeypatch.setattr("sys.argv", ["graph", "--model", "a", "b"])
    with pytest.raises(SystemExit) as ended:
        graph.main()
    assert ended.value.code is None
    assert "    13  in each of 1 layers\n    32  indices\n     6  sampling" in capsys.readouterr().out
    worse = STEP._replace(rooms={**STEP.rooms, "indices": 100})
    monkeypatch.setattr(graph, "compiled", lambda model, layers, rows: worse)
    with pytest.raises(SystemExit) as failed:
        graph.main()
    assert "108 nodes outside of layers: at most 40" in str(failed.value.code)


def test_calls_of_ptxas_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without an output compiles nothing. The program behind it gets the same arguments."""
    real = tmp_path / "bin" / "ptxas"
    real.parent.mkdir()
    real.write_text('#!/bin/sh\necho "V13.5.37 $*"\n')
    real.chmod(0o755)
    (tmp_path / "nvvm").mkdir()
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with ptxas.counted() as calls:
        root = Path(os.environ["CUDA_ROOT"])
        assert root != tmp_path
        assert (root / "nvvm").is_dir()
        assert calls() == 0
        for given in (["--version"], ["a b", "-o", "c"], ["d", "-o", "e", "-v"]):
            ran = subprocess.run([root / "bin" / "ptxas", *given], capture_output=True, text=True, check=True)
            assert ran.stdout == f"V13.5.37 {' '.join(given)}\n"
        assert calls() == 2
    assert os.environ["CUDA_ROOT"] == str(tmp_path)


def test_without_a_ptxas_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error says what to install."""
    monkeypatch.setattr(ptxas, "find_ptxas", lambda: None)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no ptxas: install the packages of the extra aot"), ptxas.counted():
        pass
