"""`jswa bench serve`: its arithmetic on records made by hand, and its load on a server that counts requests."""

import importlib.util
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jswa.bench import cli as bench_cli
from jswa.bench.config import BenchConfig
from jswa.bench.load import arrivals, bodies
from jswa.bench.report import RequestRecord, limits_of, percentile, plot, report, summary
from jswa.errors import ConfigError
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving


def record(first: float, gap: float, tokens: int) -> RequestRecord:
    """A request whose pieces of text arrived at even intervals."""
    chunks = [first + gap * i for i in range(tokens)]
    return RequestRecord(0.0, chunks, chunks[-1], prompt_tokens=10, cached_tokens=4, completion_tokens=tokens)


def test_the_figures_of_three_requests() -> None:
    records = [record(0.1, 0.02, 11), record(0.3, 0.04, 6), RequestRecord(0.0, error="status 500")]
    found = summary(records, 2.0, limits_of(("ttft:200", "tpot:30")))
    assert (found["requests"], found["failed"], found["completion_tokens"], found["cached_tokens"]) == (3, 1, 17, 8)
    assert found["request_throughput"] == 1
    assert found["output_throughput"] == 8.5
    assert found["total_throughput"] == 18.5
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["tpot_ms"]["p50"] == pytest.approx(30)
    assert found["e2el_ms"]["p99"] == pytest.approx(500 - 0.01 * 200)
    assert found["itl_ms"]["mean"] == pytest.approx((10 * 20 + 5 * 40) / 15)
    assert found["goodput"] == 0.5, "one of three, in two seconds"
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert any("goodput 0.50" in line for line in report(found))


def test_percentiles_are_interpolated() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, p) for p in (0, 25, 50, 90, 100)] == [1, 2, 3, 4.6, 5]
    assert percentile([7.0], 99) == 7


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4000, 20.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.08), "exponential: as much spread as mean"
    assert arrivals(3, math.inf, 0) == [0, 0, 0]
    assert times == arrivals(4000, 20.0, seed=1)


def test_random_prompts_share_only_their_prefix(tmp_path: Path) -> None:
    asked = [body["prompt"].split() for body in bodies(BenchConfig(prefix_words=5, input_words=20, num_prompts=9))]
    assert len({tuple(words[:5]) for words in asked}) == 1
    assert len({tuple(words) for words in asked}) == 9
    assert {len(words) for words in asked} == {25}
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 3}\n')
    given = bodies(BenchConfig(prompts=tmp_path / "p.jsonl", num_prompts=3))
    assert [(body["prompt"], body["max_tokens"]) for body in given] == [("a", 64), ("b", 3), ("a", 64)]
    (tmp_path / "p.jsonl").write_text("a\n")
    with pytest.raises(ConfigError, match="prompts"):
        bodies(BenchConfig(prompts=tmp_path / "p.jsonl"))


@pytest.fixture
def client() -> Iterator[Client]:
    """A server with steps of 5 ms that runs 4 requests at a time."""
    engine = FakeEngine(max_rows=4)
    engine.delay = 0.005
    with serving(engine, template="{% for m in messages %}{{ m.content }}{% endfor %}", api_key=("k",)) as found:
        yield found


@pytest.mark.parametrize("flags", [["--max-concurrency", "4"], ["--request-rate", "50", "--endpoint", "chat"]])
def test_a_run_against_a_server_writes_its_figures(
    client: Client, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    common = ["--base-url", client.url, "--api-key", "k", "--num-prompts", "12", "--warmup", "2", "--input-words", "9"]
    common += ["--output-tokens", "8", "--goodput", "tpot:1000", "--goodput", "ttft:20000", "--json", str(file)]
    assert bench_cli.main([*common, *flags]) == 0
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["completion_tokens"]) == (12, 0, 96)
    assert len(client.engine.seen) == 14
    assert found["slo_attainment"] == 1
    assert found["tpot_ms"]["mean"] > 0
    assert found["ttft_ms"]["p50"] >= 5
    # On a busy machine several pieces may arrive together, but none before its step.
    assert found["e2el_ms"]["p50"] >= 8 * 5
    assert "12 requests" in capsys.readouterr().out
    assert '"k"' not in file.read_text()


def test_only_the_open_loop_counts_the_wait_for_max_concurrency(client: Client, tmp_path: Path) -> None:
    common = ["--api-key", "k", "--num-prompts", "8", "--input-words", "3"]
    common += ["--output-tokens", "10", "--max-concurrency", "1", "--json", str(tmp_path / "out.json")]
    longest = []
    for flags in (["--base-url", client.url], ["--request-rate", "10000", "--base-url", f"{client.url}/v1"]):
        assert bench_cli.main([*common, *flags]) == 0
        longest.append(json.loads((tmp_path / "out.json").read_text())["e2el_ms"]["p99"])
    assert longest[1] > 4 * longest[0]


def test_failed_requests_are_counted_and_printed(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "temperature": -1}\n')
    common = ["--base-url", client.url, "--api-key", "k", "--prompts", str(tmp_path / "p.jsonl")]
    assert bench_cli.main([*common, "--num-prompts", "4", "--output-tokens", "2"]) == 1
    printed = capsys.readouterr().out
    assert "2 failed" in printed
    assert "error: status 400" in printed
    with pytest.raises(ConfigError, match=r"base_url = .*answers GET /models with status 401"):
        bench_cli.main(["--base-url", f"{client.url}/v1", "--num-prompts", "1"])  # no key
    with pytest.raises(ConfigError, match="base_url"):
        bench_cli.main(["--base-url", "http://127.0.0.1:9", "--num-prompts", "1"])
    for goodput in ("ttft", "ttft:x", "itl:5"):
        with pytest.raises(ConfigError, match="goodput"):
            bench_cli.main([*common, "--goodput", goodput])


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If matplotlib is missing, the error names the extra to install."""
    if importlib.util.find_spec("matplotlib") is not None:
        plot([record(0.1, 0.02, 11), record(0.3, 0.04, 6)], tmp_path / "p.png")
        assert (tmp_path / "p.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[bench\]"):
        plot([], tmp_path / "p.png")


@pytest.mark.parametrize("option", ["num_prompts", "max_concurrency", "request_rate", "output_tokens"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        BenchConfig(**{option: 0})  # type: ignore[arg-type]


def test_help_imports_no_jax() -> None:
    code = "import sys; from jswa.commands.cli import main; sys.argv = ['jswa', 'bench', 'serve', '--help']; main()"
    code = f"try:\n    {code}\nfinally:\n    assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "--request-rate" in done.stdout


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    code = "import sys; sys.modules['httpx2'] = None; sys.argv = ['jswa', 'bench', 'serve']"
    code += "; from jswa.commands.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert 'pip install ".[bench]" in the clone of jswa' in done.stderr
