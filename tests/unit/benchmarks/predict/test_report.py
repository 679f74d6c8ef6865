"""`benchmarks.predict.report`: all or some results, of an H200 or of a CPU, on made-up files."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_file
from benchmarks.predict import plots
from benchmarks.predict.compare import calls_of, differences, expert_work, kernel_work
from benchmarks.predict.constants import H200
from benchmarks.predict.counts import FORMATS
from benchmarks.predict.figures import PUBLISHED, known, throughput_row
from benchmarks.predict.report import main
from benchmarks.predict.results import formats_of, model_of, options, read_folder
from benchmarks.predict.step import Load, seconds_of, works_of
from tools.cases.kernels.attention_layers import DECODE_LAYERS
from tools.cases.kernels.experts import LAYERS

C = H200.constants
PACKED = "gpt-oss-20b, 4 bits"
EXPERTS = {"layer": PACKED, "matrix": "up", "tokens": 256, "bytes": 32 * 2 * 2880**2 * 17 / 32}
RATES = {"copy_bytes_per_s": 4.2e12, "flops": 780e12}


def predicted(model: str, formats: str, load: Load) -> float:
    return seconds_of(works_of(known(model, FORMATS[formats]), load), C)


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": 0.9 * value, "max": 1.1 * value}


def write_steps(folder: Path, model: str, times: dict[Load, float | str], *more: str, device: str) -> None:
    """Write a file as `decode_steps` does, of a step's seconds or the reason why there are none."""
    rows = []
    for load, value in times.items():
        row: dict[str, Any] = {"rows": load.rows, "context": load.context, "tokens": load.tokens}
        if isinstance(value, str):
            rows.append({**row, "why": value})
        else:
            size = 1e9 * load.rows * load.context / 1e3
            row |= {"seconds": spread(value), "launch_seconds": 1e-4, "bytes": size, "flops": 1e12, "share": 0.8}
            rows.append(row)
    command = " ".join(["python -m benchmarks.gpu.decode_steps --hub", model, *more])
    result_file.write(
        folder / f"steps-{model}.json",
        {"device": device, "start_seconds": 9.0, "roof": RATES, "steps": rows},
        {"command": command},
    )


def write_kernels(folder: Path, device: str) -> dict[str, Any]:
    """Write a file as `kernels` does, of a kernel that is 0.2 ms slower than predicted. Return its row."""
    layer = replace(next(each for each in DECODE_LAYERS if each.name == "gemma-3-27b full"), batch=64, context=8192)
    row: dict[str, Any] = {"label": "gemma-3-27b full, decode, 64 x 8192", "layer": asdict(layer), "queries": 1}
    row |= {"bytes": 4.3e9, "flops": 1.7e10}
    late = kernel_work(row).seconds(C) + 2e-4  # of each of 10 layers
    row["seconds"] = {"mosaic": {"median": late, "least": late, "most": late}, "cudnn": "NotImplementedError: no"}
    result_file.write(folder / "kernels.json", {"device": device, "ceilings": RATES, "attention": [row]}, {})
    return row


def write_all(folder: Path, device: str = "NVIDIA H200") -> None:
    """Write a file of each stage."""
    gemma, oss = Load(64, 8192), Load(256, 1536)
    late = predicted("gemma-3-27b", "bf16", gemma) + 5e-3
    times: dict[Load, float | str] = {
        gemma: late,
        Load(6, 8192): 0.02,
        Load(6, 131_072): 0.034,
        Load(256, 8192): "does not fit",
    }
    write_steps(folder, "gemma-3-27b", times, device=device)
    soon = predicted("gpt-oss-20b", "mxfp4", oss) - 1e-3
    write_steps(folder, "gpt-oss-20b", {oss: soon}, "--quantization", "mxfp4", device=device)
    row = write_kernels(folder, device)
    result_file.write(
        folder / "torch.json", {"attention": [{"label": row["label"], "seconds": {"sdpa": {"median": 1.1e-3}}}]}, {}
    )
    of_two = {"1024": {"seconds": spread(20.0)}, "256": {"seconds": spread(6.0)}}
    figures = {"seconds": spread(20.0), "tokens_per_s": spread(22_938.0), "prefill_tokens_per_s": spread(50_000.0)}
    words = "python -m benchmarks.speed.offline --hub gpt-oss-20b --quantization=mxfp4 --prompts 256 --input 1024"
    header = {"command": f"{words} --output 1024 256 --max-num-seqs 256"}
    result_file.write(
        folder / "offline-gpt-oss-20b.json",
        {"device": device, "batched": figures, "alone": figures, "by_output": of_two},
        header,
    )
    peer = {"device": "x86_64", "attention": "sdpa", "tokens_per_s": spread(9e3), "output_tokens_per_s": spread(5e3)}
    result_file.write(folder / "peer-gpt-oss-20b.json", peer, {})
    late = 1.5 * expert_work(next(each for each in LAYERS if each.name == PACKED), EXPERTS).seconds(C)
    row = {**EXPERTS, "default": {"median": late, "least": late, "most": late}}
    result_file.write(folder / "experts.json", {"device": device, "ceilings": RATES, "experts": [row]}, {})
    cases = [{"model": "a", "wrong": ""}, {"model": "b", "wrong": "log probabilities differ by 1"}]
    result_file.write(folder / "cached.json", {"device": device, "cached": cases}, {})
    (folder / "facts.json").write_text('{"device": "NVIDIA H200"}')


def report(folder: Path, *words: str) -> str:
    """Make the report in a folder of its own and return its text."""
    main([str(folder), "--out", str(folder / "out"), *words])
    return (folder / "out" / "report.md").read_text(encoding="utf-8")


def test_a_whole_run_is_ranked_by_the_time_that_a_step_loses(tmp_path: Path) -> None:
    write_all(tmp_path)
    found = differences(read_folder(tmp_path), C)
    lost = {each.what: each.lost for each in found if each.lost is not None}
    assert lost["gemma-3-27b, bf16, 64 x 8,192"] == pytest.approx(5, abs=0.02)  # files have four digits
    assert lost["gemma-3-27b full, decode, 64 x 8192 (mosaic)"] == pytest.approx(2, abs=0.02)
    assert lost["gpt-oss-20b, mxfp4, 256 x 1,536"] == pytest.approx(-1, abs=0.02)
    experts = expert_work(next(each for each in LAYERS if each.name == PACKED), EXPERTS).seconds(C)
    assert lost[f"{PACKED}, up, 256 tokens"] == pytest.approx(24 * 1e3 * experts / 2, rel=1e-3)
    assert [abs(value) for value in lost.values()] == sorted(map(abs, lost.values()), reverse=True)
    assert {each.kind for each in found} == {"step", "kernel", "throughput", "machine"}
    text = report(tmp_path)
    assert "**missing**" not in text
    assert "| not read | facts.json |" in text
    rank = [text.index(f"| {what} |") for what in lost]
    assert rank == sorted(rank)
    assert "| cached = cold | 1 of 2 cases | no |" in text
    assert "| 13,107 (256 prompts of 768, 1024 out) | no |" in text  # 256 · 1,024 tokens in 20 s
    assert "| 80% | no |" in text
    assert "6 rows, 8,192 to 131,072: added bytes at" in text
    assert "does not fit" in text
    assert "| gemma-3-27b full, decode, 64 x 8192 |" in text
    assert " | 1100.0 |" in text  # SDPA, from the file of torch


def test_the_throughput_of_a_load_is_compared_with_that_of_full_batches(tmp_path: Path) -> None:
    """256 prompts of 512 to 1,024 tokens, 768 on average, in 256 rows."""
    write_all(tmp_path)
    found = [each for each in differences(read_folder(tmp_path), C) if each.kind == "throughput"]
    assert sorted(each.what.rpartition(", ")[2] for each in found) == ["1024 out", "256 out", "prefill"]
    load, prefill = (next(each for each in found if each.what.endswith(end)) for end in (" 1024 out", "prefill"))
    full = throughput_row("gpt-oss-20b", "mxfp4", 256, 768, 1024, "greedy", H200)
    assert load.predicted == pytest.approx(full["output_tokens_per_s"])
    assert load.measured == pytest.approx(256 * 1024 / 20)
    assert load.lost is not None
    assert load.lost == pytest.approx(1e3 * 256 * (1 / load.measured - 1 / load.predicted))
    assert prefill.predicted == pytest.approx(1 / full["prefill_seconds_per_token"] / 1024 * 768)
    assert load.low < load.predicted < load.high


def test_a_copy_that_is_slower_than_predicted_is_listed(tmp_path: Path) -> None:
    write_kernels(tmp_path, "NVIDIA H200")
    found = [each for each in differences(read_folder(tmp_path), C) if each.kind == "machine"]
    assert [(each.measured, each.inside) for each in found if "copy" in each.what] == [(4.2e12, True)]


def test_missing_stages_are_named(tmp_path: Path) -> None:
    write_steps(tmp_path / "call-2", "gemma-3-27b", {Load(64, 8192): 0.04}, device="NVIDIA H200")
    text = report(tmp_path)
    assert "| attention kernels | **missing** |" in text
    assert "| throughput of the engine | **missing** |" in text
    assert "steps-gemma-3-27b.json" in text
    assert "13,858 output tokens/s | missing |" in text


def test_a_cpu_is_compared_with_nothing_unless_a_machine_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, device="cpu")
    text = report(tmp_path)
    assert "There are no constants for cpu" in text
    assert "H200" not in text
    assert "What differs" not in text
    text = report(tmp_path, "--machine", "H200")
    assert "Predicted for H200 (constants: --machine); measured on cpu." in text
    assert "What differs" in text


def test_constants_come_from_the_file_of_predictions(tmp_path: Path) -> None:
    write_all(tmp_path / "run", device="cpu")
    before = result_file.read(PUBLISHED)
    before["constants"]["between_steps"] = 0.1
    result_file.write(tmp_path / "before.json", before, {})
    text = report(tmp_path / "run", "--predicted", str(tmp_path / "before.json"))
    late = predicted("gpt-oss-20b", "mxfp4", Load(256, 1536)) + 0.1 - C.between_steps
    assert f"| {1e3 * late:.2f} ms (" in text


def two_devices(folder: Path) -> None:
    write_all(folder)
    write_kernels(folder, "cpu")


@pytest.mark.parametrize(
    ("prepare", "words", "message"),
    [
        (lambda folder: write_kernels(folder, "NVIDIA L4"), [], "'NVIDIA L4'.*--machine"),
        (two_devices, [], "several devices: NVIDIA H200, cpu"),
        (lambda folder: (folder / "a.json").write_text("{"), [], "a.json is not JSON"),
        (lambda folder: None, [], "no result file of cached, experts, kernels, torch, steps, offline, peer"),
        (lambda folder: write_kernels(folder, "cpu"), ["--predicted", "no.json"], "no.json has no constants"),
    ],
    ids=["unknown device", "two devices", "not JSON", "empty", "no predictions"],
)
def test_errors_name_their_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, words: list[str], message: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(SystemExit):
        report(tmp_path, *words)
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def test_plots_show_the_roof_of_the_run_and_the_prediction_beside_the_measurement(tmp_path: Path) -> None:
    write_all(tmp_path)
    results = read_folder(tmp_path)
    ((_, kernels),) = results.stages["kernels"]
    assert list(plots.roofline_points(kernels)) == ["mosaic"]  # cuDNN was not measured
    lines = {(line.model, line.rows): line for line in plots.step_lines(results, C)}
    six = lines["gemma-3-27b", 6]
    assert six.measured == [(8192, 20.0), (131_072, 34.0)]
    assert [at for at, _ in six.predicted] == [8192, 131_072]
    assert all(roof < step for (_, roof), (_, step) in zip(six.roof, six.predicted, strict=True))
    bars = plots.scope_bars(results, C)
    assert set(bars) == {"gemma-3-27b, 64 x 8,192", "gemma-3-27b, 6 x 131,072", "gpt-oss-20b, 256 x 1,536"}
    assert all(sum(shares.values()) == pytest.approx(1) for shares in bars.values())
    for line in plots.step_lines(results, None):
        assert not line.predicted
        assert not line.roof
    assert plots.scope_bars(results, None) == {}


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    write_all(tmp_path)
    text = report(tmp_path)
    for name in ("roofline.png", "steps.png", "scopes.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
        assert f"![]({name})" in text


def test_model_and_formats_are_read_from_file_command_or_name() -> None:
    assert options({"command": "python -m x --hub=a --flag --rows 1 2"}) == {"--hub": "a", "--rows": "1"}
    assert model_of(Path("steps-Mistral-7B-v0.1.json"), {}) == "Mistral-7B-v0.1"
    assert model_of(Path("a.json"), {"model": "gemma-3-27b", "command": "x --hub gpt-oss-20b"}) == "gemma-3-27b"
    assert model_of(Path("steps-tiny.json"), {"command": "x --config config.json"}) is None
    assert formats_of({}) == formats_of({"command": "x --quantization auto"}) == "bf16"
    assert formats_of({"quantization": "mxfp4"}) == "mxfp4"
    assert formats_of({"command": "x --quantization fp8 --kv-cache-dtype fp8"}) == "fp8, fp8 KV"
    assert formats_of({"command": "x --quantization int3"}) is None


def test_layers_of_a_kernel_are_counted_in_its_model() -> None:
    assert calls_of("gemma-3-27b full, decode, 64 x 8192") == 10
    assert calls_of("gemma-3-27b local, one row, decode, 1 x 8192") == 52
    assert calls_of("MiMo-V2-Flash local, decode, 64 x 8192") == 39
    assert calls_of("Mistral-7B, decode, 16 x 8192") == 32
    assert calls_of("64/8 heads of 64, W 1024, prefill 8192, 1 x 8192") is None
