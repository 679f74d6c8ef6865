"""The results that `benchmarks.scale.run` writes, and the tables made of them."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from benchmarks.scale.report import markdown, throughput
from benchmarks.scale.run import SECTIONS, case, measure, rate_of, read, save
from benchmarks.scale.traces import SHAPES


def test_rows_can_be_saved_and_read(tmp_path: Path) -> None:
    """With their settings and assumptions, which the tables show too."""
    one = replace(case("main", "gemma-3-27b", "agents", "prefix-aware", 2), seconds=12.0, warm=2.0)
    path, row = tmp_path / "rows.json", measure(one)
    save(path, [row])
    assert read(path) == {astuple(one): row}
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["measured_on_a_gpu"].startswith("nothing")
    text = markdown(found)
    assert "No kernel was timed on a GPU" in text
    assert f"| 2, prefix-aware | {100 * row['hit_rate']:.1f} |" in text


def test_no_two_rows_of_a_section_are_equal() -> None:
    """Each has a load, a measured time and enough replicas."""
    for name, section in SECTIONS.items():
        cases = list(section())
        assert len(set(cases)) == len(cases), name
        assert all(0 <= each.warm < each.seconds and each.rate > 0 for each in cases)


@pytest.mark.parametrize("trace", SHAPES)
def test_faster_replicas_get_a_higher_load(trace: str) -> None:
    """The load of other models follows from the cost of a session."""
    assert rate_of("gpt-oss-120b", trace) > 2 * rate_of("gemma-3-27b", trace)


def test_assumed_throughput_is_that_of_real_engines() -> None:
    """Between one and two times the figure that TensorRT-LLM has published."""
    assert 1.0 < throughput("gpt-oss-120b", 1000, 1000) / 6868 < 2.0
