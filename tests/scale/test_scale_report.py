"""The result file of `benchmarks.scale.run`, and the tables made from it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import result_file
from benchmarks.scale.report import markdown, throughput
from benchmarks.scale.run import SECTIONS, case, key_of, measure, rate_of, read, save
from benchmarks.scale.traces import SHAPES


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    """By their settings, rounded; file and tables say that no kernel was timed."""
    one = replace(case("main", "gemma-3-27b", "agents", "prefix-aware", 2), seconds=12.0, warm=2.0)
    path, row = tmp_path / "rows.json", measure(one)
    save(path, [row])
    assert read(path) == {key_of(asdict(one)): result_file.rounded(row)}
    found = result_file.read(path)
    assert found["measured_on_a_gpu"].startswith("nothing")
    text = markdown(found)
    assert "No kernel was timed on a GPU" in text
    assert f"| 2, prefix-aware | {100 * row['hit_rate']:.1f} |" in text


def test_no_two_rows_of_a_section_are_equal() -> None:
    """And each has a load and counted time."""
    for name, section in SECTIONS.items():
        cases = list(section())
        assert len(set(cases)) == len(cases), name
        assert all(0 <= each.warm < each.seconds and each.rate > 0 for each in cases)


@pytest.mark.parametrize("trace", SHAPES)
def test_faster_replicas_get_more_load(trace: str) -> None:
    """The load of a model follows from the device time of a session."""
    assert rate_of("gpt-oss-120b", trace) > 2 * rate_of("gemma-3-27b", trace)


def test_throughput_is_one_to_two_times_a_published_figure() -> None:
    """The assumptions are optimistic: not slower than TensorRT-LLM, and less than twice as fast."""
    assert 1.0 < throughput("gpt-oss-120b", 1000, 1000) / 6868 < 2.0
