"""The comparison on real weights: files of other types, first differences, windows, ratios and tables."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from benchmarks.real import files, run, speed, tables, text, tokens
from benchmarks.real.engines.serve import memory, shared
from benchmarks.real.prompts import QUESTIONS, TEXTS

RANDOM = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


def test_fifty_prompts_are_different_and_ten_are_in_the_fixture() -> None:
    assert len({*QUESTIONS, *TEXTS}) == len(QUESTIONS) + len(TEXTS) == 50
    assert len(set(run.FEW)) == 10
    assert max(run.FEW) < 50


@pytest.mark.parametrize("kind", files.TYPES)
def test_a_file_of_another_type_has_the_same_metadata_and_the_nearest_numbers(kind: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_context_length(128)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("norm.weight", RANDOM[0])
    q4_1 = GGMLQuantizationType.Q4_1
    writer.add_tensor("matrix.weight", quantize(RANDOM, q4_1), raw_dtype=q4_1)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()

    files.write(source, target, kind)

    before, after = GGUFReader(source), GGUFReader(target)
    kept = [key for key in before.fields if not key.startswith("GGUF.")]
    assert {key: after.fields[key].contents() for key in kept} == {key: before.fields[key].contents() for key in kept}
    norm, matrix = after.tensors
    assert (norm.data == RANDOM[0]).all()
    assert matrix.tensor_type.name == kind
    numbers = dequantize(before.tensors[1].data, q4_1)
    error = np.abs(dequantize(matrix.data, matrix.tensor_type) - numbers).max()
    assert error <= {"F32": 0, "F16": 2**-10, "Q8_0": np.abs(numbers).max() / 254 + 2**-10}[kind]
    assert (error > 0) == (kind != "F32")


class Reference:
    """An engine of which only the gap of two logits is asked."""

    def call(self, method: str, **given: Any) -> float:
        """Return the gap, which says what was asked."""
        assert method == "gap"
        return float(len(given["ids"]) + given["first"] / 10 + given["second"] / 100)


def test_the_first_difference_of_each_answer_is_found_with_its_gap() -> None:
    prompts, expected, found = [[1, 2], [3]], [[4, 5, 6], [7, 8, 9]], [[4, 1, 2], [7, 8, 9]]
    compared = tokens.compared(prompts, expected, found, cast(Any, Reference()))
    (one,) = compared["differences"]
    assert compared["same"] == 1
    assert one == {"prompt": 0, "at": 1, "expected": 5, "found": 1, "gap": pytest.approx(3 + 0.5 + 0.01)}
    assert (
        run.show_tokens(
            {"prompts": 2, "rows": [{"engine": "jswa", "file": "", "options": "", "same ids": 2} | compared]}
        )
        == 1
    )


def test_windows_do_not_overlap_and_a_short_rest_is_left_out() -> None:
    assert text.windows([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert len(text.reference(200_000).encode()) == pytest.approx(200_000, abs=3)
    assert text.about(text.reference(1000))["bytes"] == pytest.approx(1000, abs=3)


def test_the_common_beginning_of_two_texts() -> None:
    assert [shared([1, 2, 3], other) for other in ([1, 2, 4, 5], [1, 2], [9], [])] == [2, 2, 0, 0]


def test_a_ratio_above_one_is_faster_in_rates_and_in_seconds() -> None:
    ours, theirs = [{"decode": 20.0, "second": 1.0}], [{"decode": 10.0, "second": 2.0}]
    assert speed.ratios(ours, theirs, "decode") == speed.ratios(ours, theirs, "second") == [2.0]


def test_the_memory_of_a_process_is_read() -> None:
    found = memory()
    assert found["peak"] >= found["now"] > found["own now"] > 1


def test_tables_name_what_differs() -> None:
    row = {"engine": "llamacpp", "file": "Q4_1", "options": "kv=f16", "same": 1, "same ids": 2}
    found = {"prompts": 2, "steps": 3, "rows": [row | {"differences": [{"gap": 0.25}]}]}
    _, rows = tables.tokens(lambda name: found)
    assert rows == [["llama.cpp", "Q4_1", "kv=f16", "1", "0.25 (0.25)", "2"]]


def test_tables_of_speed_compare_other_engines_with_llama_cpp() -> None:
    spread = {"median": 2.0, "min": 1.0, "max": 4.0}
    figures = {name: spread for figure in speed.FIGURES for name in (figure, f"{figure} ratio")}
    row = {"engine": "jswa", "file": "F16", "options": "", "memory": {"peak": 9.6}, **figures}
    _, rows = tables.speed(lambda name: {"rows": [row, row | {"engine": "llamacpp"}]})
    ratio = "2.00 (1.00 to 4.00)"
    assert rows == [
        ["F16", "jswa", "", f"2: {ratio}", f"2.0: {ratio}", f"2.000: {ratio}", "10"],
        ["F16", "llama.cpp", "", "2", "2.0", "2.000", "10"],
    ]
