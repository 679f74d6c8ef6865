"""Tests of the gates of compiled kernels: what is worse than committed is named."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools.aot.hopper import part
from tools.aot.measures import copies
from tools.aot.step_specs import SAMPLE_STEPS, STEPS
from tools.aot.triton_facts import gpu
from tools.cases.kernels.attention_layers import FP8_LAYERS, SPLIT_LAYERS
from tools.cases.kernels.experts import TRITON_GPUS, TRITON_LAYERS, TRITON_TOKENS
from tools.cases.kernels.experts_shapes import MATRICES
from tools.cases.kernels.small.elementwise import NORM_LAYERS, ROPE_LAYERS
from tools.cases.kernels.small.routing import LAYERS, TOKENS
from tools.gates import FOLDER, worse, write

GOOD = {"spills": 0, "blocks_per_sm": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the figures of one kernel."""
    write({"norms": GOOD}, "kernels.json", {"jax": "0"}, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        (GOOD, None),
        ({"spills": 0, "blocks_per_sm": 3}, None),
        ({"spills": 4, "blocks_per_sm": 2}, "norms: spills is 4, committed is 0 (kernels.json)"),
        ({"spills": 0, "blocks_per_sm": 1}, "norms: blocks_per_sm is 1, committed is 2 (kernels.json)"),
    ],
)
def test_what_is_worse_is_named(folder: Path, figures: dict[str, float], fault: str | None) -> None:
    """And what is better is not."""
    assert worse({"norms": figures}, "kernels.json", folder) == ([] if fault is None else [fault])


def test_writing_an_entry_keeps_the_others(folder: Path) -> None:
    """A sample writes a few."""
    bad = {"spills": 4, "blocks_per_sm": 2}
    assert not worse({"rope": bad}, "kernels.json", folder)
    write({"rope": GOOD}, "kernels.json", {"jax": "1"}, folder)
    assert len(worse({"rope": bad, "norms": bad}, "kernels.json", folder)) == 2


def test_copies_per_stage_are_as_committed() -> None:
    """Of all layers: their number, and the bytes of the smallest. `tools.aot.measures.copies --write` writes them."""
    found = copies.figures()
    assert json.loads((FOLDER / copies.GATES).read_text())["figures"].keys() == found.keys()
    assert worse(found, copies.GATES) == []


def test_a_figure_that_is_not_committed_is_not_compared(folder: Path) -> None:
    """A new figure passes until it is written."""
    assert worse({"norms": {**GOOD, "copies": 9}}, "kernels.json", folder) == []


def test_routing_has_gates() -> None:
    """Of each router that is compiled: one kernel for few tokens, two for many."""
    committed = json.loads((FOLDER / "routing.json").read_text())["figures"]
    kernels = {name: figures["kernels"] for name, figures in committed.items() if "kernels" in figures}
    assert set(kernels) == {f"{layer.name}, {tokens} tokens" for layer in LAYERS for tokens in TOKENS}
    assert kernels["gpt-oss-20b, 256 tokens"] == 1
    assert kernels["MiMo-V2-Flash, 64 tokens"] == 2
    assert len(committed) == len(kernels) + sum(kernels.values())


def test_the_grouped_product_on_triton_has_gates() -> None:
    """On each GPU, of each matrix with the fewest and the most tokens; no register is spilled."""
    committed = json.loads((FOLDER / "grouped.json").read_text())["figures"]
    for card in map(gpu, TRITON_GPUS):
        for layer in TRITON_LAYERS:
            for matrix in MATRICES:
                for tokens in (TRITON_TOKENS[0], TRITON_TOKENS[-1]):
                    figures = committed[f"{layer.name} {matrix}, {tokens} tokens, {card.name}"]
                    assert figures["spills"] == 0
                    assert figures["smem"] <= card.smem
                    assert figures["blocks_per_sm"] >= 1


def test_elementwise_kernels_have_gates() -> None:
    """All of them, and nothing is committed for a case that is gone; of steps, those whose layers they make short."""
    kernels = {f"residual_norms, {case.name}, {case.tokens} tokens" for case in NORM_LAYERS}
    kernels |= {f"rotate_and_write, {case.name}, {case.tokens} tokens" for case in ROPE_LAYERS}
    assert set(json.loads((FOLDER / "elementwise.json").read_text())["figures"]) == kernels
    committed = json.loads((FOLDER / "steps.json").read_text())["figures"]
    mistral = committed["Mistral-7B-v0.1, 4 layers, 64 rows, elementwise on mosaic"]
    assert mistral["in_layer"] == 8
    routed = {"gpt-oss-20b, 4 layers": 10, "MiMo-V2-Flash/V2.5, 7 layers": 12, "Llama-4-Scout, 16 layers": 12}
    for name, kernels_of_layer in routed.items():
        held = ", mxfp4" * name.startswith("gpt-oss")
        found = committed[f"{name}, 64 rows{held}, elementwise on mosaic, routing on triton"]
        assert found["in_layer"] == kernels_of_layer
        assert found["graphs"] == 1
    assert mistral["bytes_moved"] < 1.15
    assert mistral["logits_greedy"] == 1


def test_attention_over_a_list_has_gates() -> None:
    """Two thread blocks fit on a multiprocessor, except with two consumers."""
    committed = json.loads((FOLDER / "attention.json").read_text())["figures"]
    for layer in SPLIT_LAYERS:
        assert committed[layer.name]["spills"] == 0
        alone = layer.count or layer.heads[3] > 256
        assert committed[layer.name]["blocks_per_sm"] >= (1 if alone else 2)


def test_decode_over_pages_of_8_bits_has_gates() -> None:
    """Two thread blocks fit on a multiprocessor, unless heads have 256 columns or more."""
    committed = json.loads((FOLDER / "attention.json").read_text())["figures"]
    for layer in FP8_LAYERS:
        if layer.heads[2] < 256 and not layer.count:
            assert committed[layer.name]["spills"] == 0
            assert committed[layer.name]["blocks_per_sm"] >= 2


def test_shallow_steps_and_those_of_ci_have_gates_and_all_gates_are_of_steps() -> None:
    """A gate of a step that is not compiled any more would hold nothing."""
    committed = json.loads((FOLDER / "steps.json").read_text())["figures"]
    assert committed.keys() <= {spec.name for spec in (*STEPS, *SAMPLE_STEPS)}
    wanted = {spec.name for spec in (*STEPS, *SAMPLE_STEPS) if not spec.shorter or spec in SAMPLE_STEPS}
    assert committed.keys() >= wanted


@pytest.mark.parametrize(
    "targets", [[["gpu-compile"]], [["nightly-gpu", f"TEST_NIGHT={night}"] for night in range(739_947, 739_961)]]
)
def test_gpu_compile_and_two_weeks_of_nights_compile_every_step_once(targets: list[list[str]]) -> None:
    """By the parts that make gives to `tools.aot.hopper`."""
    found: list[str] = []
    for target in targets:
        said = subprocess.run(
            ["make", "-n", *target], cwd=FOLDER.parents[2], capture_output=True, text=True, check=True
        )
        for first, every in map(part, re.findall(r"hopper --part (\d+/\d+)", said.stdout)):
            found += [spec.name for spec in STEPS[first::every]]
    assert sorted(found) == sorted(spec.name for spec in STEPS)


def test_two_nights_compile_all_modules() -> None:
    nights = []
    for night in (739_947, 739_948):
        command = ["make", "-n", "nightly-gpu", f"TEST_NIGHT={night}"]
        said = subprocess.run(command, cwd=FOLDER.parents[2], capture_output=True, text=True, check=True).stdout
        (line,) = (one for one in said.splitlines() if "hopper --part" in one)
        nights.append(set(re.findall(r"\b(experts|parallel|triton|small\.\w+)\b", line.partition("|")[0])))
    first, second = nights
    assert not first & second
    modules = {f"small.{path.stem}" for path in (FOLDER.parent / "small").glob("*.py") if path.stem != "__init__"}
    assert first | second >= {"experts", "parallel", "triton"}
    assert {name for name in first | second if name.startswith("small.")} <= modules
