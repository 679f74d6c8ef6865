"""What `benchmarks.scale.run` writes, and the tables made of it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import result_file
from benchmarks.scale.report import markdown, throughput
from benchmarks.scale.run import SECTIONS, case, key_of, measure, rate_of, read, save
from benchmarks.scale.traces import SHAPES


def test_rows_are_written_and_found_again(tmp_path: Path) -> None:
    """By their settings, with what they rest on; the tables say it too."""
    one = replace(case("main", "gemma-3-27b", "agents", "prefix-aware", 2), seconds=12.0, warm=2.0)
    path, row = tmp_path / "rows.json", measure(one)
    save(path, [row])
    assert read(path) == {key_of(asdict(one)): result_file.rounded(row)}
    found = result_file.read(path)
    assert found["measured_on_a_gpu"].startswith("nothing")
    text = markdown(found)
    assert "No kernel was timed on a GPU" in text
    assert f"| 2, prefix-aware | {100 * row['hit_rate']:.1f} |" in text


def test_every_row_of_the_report_is_its_own() -> None:
    """Within a section; each has a load, time that counts and replicas enough."""
    for name, section in SECTIONS.items():
        cases = list(section())
        assert len(set(cases)) == len(cases), name
        assert all(0 <= each.warm < each.seconds and each.rate > 0 for each in cases)


@pytest.mark.parametrize("trace", SHAPES)
def test_faster_replicas_get_more(trace: str) -> None:
    """The load of other models follows from what a session takes of them."""
    assert rate_of("gpt-oss-120b", trace) > 2 * rate_of("gemma-3-27b", trace)


def test_throughput_is_not_below_what_engines_reach() -> None:
    """The assumptions are no faster than twice TensorRT-LLM's published figure, and not slower."""
    assert 1.0 < throughput("gpt-oss-120b", 1000, 1000) / 6868 < 2.0
