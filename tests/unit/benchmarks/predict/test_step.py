"""`benchmarks.predict`: bytes are those that are known otherwise, times follow the constants, the figures stand."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import result_file
from benchmarks.predict.constants import H200, Constants, at_each_end, machine_of
from benchmarks.predict.constants import table as constants_table
from benchmarks.predict.counts import FORMATS, MXFP4_BITS, expert_numbers
from benchmarks.predict.figures import (
    DECODE,
    PUBLISHED,
    figures,
    fits,
    known,
    leverage_table,
    scope_table,
    shown,
    tables,
)
from benchmarks.predict.step import SCOPES, Drawing, Load, Work, predict, seconds_of, setting, works_of
from benchmarks.scale.step_time import step_time
from jswa.config import Limits
from jswa.model.hf.config import parse_config
from pallas_kernels.experts.hopper.heuristics import default_tuning
from pallas_kernels.experts.hopper.launch import FEW_ROWS, Shape
from tools.cases.hub_configs import CONFIGS

DOCUMENT = result_file.ROOT / "docs" / "performance.md"
C = H200.constants


def scopes(name: str, formats: str, load: Load) -> dict[str, Work]:
    """Return the scopes of a step."""
    return {work.scope: work for work in works_of(known(name, FORMATS[formats]), load)}


@pytest.mark.parametrize(
    ("name", "formats"), [("gpt-oss-20b", "mxfp4"), ("gemma-3-27b", "bf16"), ("Mistral-7B-v0.1", "bf16")]
)
@pytest.mark.parametrize("rows", [1, 24, 256])
def test_a_step_reads_the_weights_that_the_simulation_counts(name: str, formats: str, rows: int) -> None:
    """Whose sum is that of `jswa capacity` (tests/scale/test_step_time.py)."""
    of = known(name, FORMATS[formats])
    time = step_time(of.model, Limits(2048, 256, 2048, 64), expert_bits=of.formats.of_experts)
    found = scopes(name, formats, Load(rows, 1024))
    read = sum(found[scope].least for scope in ("qkv", "o", "router", "experts", "mlp", "head") if scope in found)
    logits = 4 * rows * of.model.vocab_size
    assert read - logits == pytest.approx(time.dense + time.experts[rows], rel=1e-9)


def test_attention_reads_the_window_in_local_layers_and_everything_in_full_ones() -> None:
    """gemma-3-27b: 10 full and 52 local layers of 16 heads of 128 + 128 numbers, 16 bits each."""
    token = 16 * 256 * 2
    short, long = (scopes("gemma-3-27b", "bf16", Load(64, context)) for context in (8192, 131_072))
    assert short["attention full"].least == 10 * 64 * 8192 * token
    assert short["attention local"].least == 52 * 64 * 1024 * token
    assert long["attention local"] == short["attention local"]
    assert long["attention full"].least == 16 * short["attention full"].least
    in_8_bits = scopes("gemma-3-27b", "fp8, fp8 KV", Load(64, 8192))
    assert in_8_bits["attention full"].least == short["attention full"].least / 2
    assert in_8_bits["mlp"].least == short["mlp"].least / 2


def test_flop_of_a_chunk_are_two_for_each_number_and_token() -> None:
    """Mistral has no full layers; its attention in a chunk multiplies the pairs inside the window."""
    found, numbers = scopes("Mistral-7B-v0.1", "bf16", Load(1, 2048, 2048)), 32 * 3 * 4096 * 14336
    assert found["mlp"].flops == 2 * 2048 * numbers
    assert found["attention local"].flops == 32 * 2 * 32 * (128 + 128) * (2048 * 2049 // 2)
    assert found["head"].flops == 2 * 32000 * 4096


def test_no_scope_is_faster_than_its_roof_and_all_are_listed() -> None:
    for name, formats, load in DECODE:
        for scope, work in scopes(name, formats, load).items():
            assert scope in SCOPES
            assert work.seconds(C) >= work.roof(C)
    assert set(scopes("gpt-oss-20b", "mxfp4", Load(1, 8192, 2048))) <= set(SCOPES)


def test_each_constant_counts_and_the_middle_is_within_the_range() -> None:
    """Each changes some figure, in the direction that its name says."""
    cases = [(name, formats, load) for name, formats, load in DECODE] + [
        ("gpt-oss-20b", "mxfp4", Load(1, 2048, 2048)),
        ("gpt-oss-20b", "bf16", Load(64, 1536)),
        ("gpt-oss-20b", "bf16", Load(1, 2048, 2048)),
        ("gemma-3-27b", "bf16", Load(1, 8192, 2048)),
    ]
    works = [works_of(known(name, FORMATS[formats]), load) for name, formats, load in cases]
    for name, low, high in at_each_end(C):
        changes = set()
        for each in works:
            at_low, at_high = seconds_of(each, low), seconds_of(each, high)
            changes |= {at_high > at_low} if at_high != at_low else set()
        costs = any(part in name for part in ("start", "small_kernel", "edge", "random", "between"))
        assert changes == {costs}, name
    for field in fields(Constants):
        assert field.metadata["low"] < field.default < field.metadata["high"], field.name
    found = predict(known("gpt-oss-20b", FORMATS["mxfp4"]), Load(256, 1536), C)
    assert found.roof < found.low < found.seconds < found.high


def test_sampling_costs_more_from_greedy_to_top_p() -> None:
    kinds: tuple[Drawing, ...] = ("greedy", "temperature", "top-p")
    times = [scopes("gpt-oss-20b", "mxfp4", Load(256, 1536, 1, kind))["sampling"].seconds(C) for kind in kinds]
    assert times == sorted(times)
    assert "sampling" not in scopes("gpt-oss-20b", "mxfp4", Load(256, 1536, 1, "none"))


@pytest.mark.parametrize("tokens", [1, 16, 64, 96, 256, 2048])
def test_the_tiles_of_experts_are_those_of_the_kernel(tokens: int) -> None:
    """Tiles of few rows have the better share; which have them follows the kernel's tuning."""
    pairs, experts = tokens * 4, 32
    shape = Shape(pairs + 7 * min(experts, pairs), experts, 2880, 2880, jnp.dtype("bfloat16"), None, True, "mxfp4")
    slow = replace(C, experts_bytes_4=C.experts_bytes_4 / 2)
    work = scopes("gpt-oss-20b", "mxfp4", Load(tokens, 1536))["experts"]
    changed = work.seconds(C) != work.seconds(slow)
    assert changed == (default_tuning(shape).rows <= FEW_ROWS)


def test_kernels_per_layer_are_those_that_the_compiler_reports(tmp_path: Path) -> None:
    """By the file that `tools.aot.hopper --json` writes; by default of the same size."""
    model, file = parse_config(CONFIGS["gpt-oss-20b"], weights=False), tmp_path / "compiled.json"
    steps = [{"name": "gpt-oss-20b, 24 layers, prefill 2048", "launches": 99.0}]
    file.write_text(json.dumps({"steps": [*steps, {"name": "gpt-oss-20b, 24 layers, 64 rows", "launches": 31.5}]}))
    assert setting("gpt-oss-20b", model, FORMATS["mxfp4"], file).kernels == 31.5
    assert setting("gpt-oss-120b", model, FORMATS["mxfp4"], file).kernels == 31.5
    unknown = setting("gpt-oss-20b", model, FORMATS["mxfp4"], tmp_path / "none.json").kernels
    assert unknown == pytest.approx(known("gpt-oss-20b", FORMATS["mxfp4"]).kernels, rel=0.15)
    fewer = replace(known("gpt-oss-20b", FORMATS["mxfp4"]), kernels=18.0)
    saved = {work.scope: work.seconds(C) for work in works_of(fewer, Load(1, 1536))}
    assert saved["norm and elementwise"] < scopes("gpt-oss-20b", "mxfp4", Load(1, 1536))[
        "norm and elementwise"
    ].seconds(C)


def test_what_fits_one_gpu() -> None:
    gemma = known("gemma-3-27b", FORMATS["bf16"])
    assert fits(gemma, Load(64, 8192), H200.memory)
    assert fits(gemma, Load(6, 131_072), H200.memory)
    assert not fits(gemma, Load(8, 131_072), H200.memory)
    assert expert_numbers(known("gpt-oss-120b", FORMATS["mxfp4"]).model) * MXFP4_BITS / 8 < H200.memory


def test_a_machine_is_known_by_its_device() -> None:
    assert machine_of("NVIDIA H200") is H200
    assert machine_of("cpu") is None
    with pytest.raises(ValueError, match=r"'NVIDIA A100-SXM4-80GB'.*H200.*--machine"):
        machine_of("NVIDIA A100-SXM4-80GB")


def test_the_published_figures_and_the_document_are_those_of_the_model() -> None:
    """`python -m benchmarks.predict.figures --json` makes both anew after a constant was measured."""
    found, published = result_file.rounded(figures(H200)), result_file.read(PUBLISHED)
    assert published["constants"] == result_file.rounded(asdict(C))
    for key in ("machine", "measured_on_a_gpu", "decode", "prefill", "throughput"):
        assert published[key] == found[key], key
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    few = shown(found["decode"])
    wanted = [*constants_table(), *tables(found), *scope_table(few), *leverage_table(few, H200)]
    assert not [line for line in wanted if line not in lines]
