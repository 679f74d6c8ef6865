"""The report of a run on a GPU: tables, plots, and what differs from the prediction, ranked.

    python -m benchmarks.predict.report DIR [--out DIR]     reads all result files in and below DIR

Reads what `benchmarks.gpu.run` and `benchmarks.speed.offline` write; a stage without a file is named as missing. Writes
report.md, roofline.png, steps.png and scopes.png. The constants of the prediction are those of the machine that the
files name; a CPU has none, and its runs are compared with nothing, unless --machine says otherwise. The plots need
matplotlib (`pip install matplotlib`).
"""

import argparse
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.predict import plots
from benchmarks.predict.compare import Difference, amount, differences, table
from benchmarks.predict.constants import MACHINES, Constants, machine_of
from benchmarks.predict.results import STAGES, File, Results, model_of, read_folder, title_of
from benchmarks.predict.step import constants_of


@dataclass(frozen=True)
class Reference:
    """What the results are compared with. `machine`: whose constants they are; both are None if there are none."""

    machine: str | None
    constants: Constants | None
    source: str


def reference(results: Results, machine: str | None, predicted: Path | None) -> Reference:
    """Return the constants of a file of predictions, or of the named machine, or of the machine of the results.

    Raises ValueError if the results come from several devices, or from one without constants.
    """
    if predicted is not None:
        file = result_file.read(predicted)
        if "constants" not in file:
            raise ValueError(f"{predicted} has no constants: benchmarks.predict.figures writes such a file")
        return Reference(file["machine"], constants_of(file), str(predicted))
    if machine is not None:
        return Reference(machine, MACHINES[machine].constants, "--machine")
    if len(results.devices) > 1:
        raise ValueError(f"the results come from several devices: {', '.join(results.devices)}")
    found = machine_of(results.devices[0]) if results.devices else None
    if found is None:
        return Reference(None, None, "")
    return Reference(found.name, found.constants, "benchmarks/predict/constants.py")


def markdown(results: Results, against: Reference) -> list[str]:
    """Return the report as lines."""
    device = ", ".join(results.devices) or "no device"
    lines = [f"# Results on {device}", "", *_stages(results), ""]
    if against.constants is None:
        lines += [f"There are no constants for {device}: nothing is compared with a prediction.", ""]
        found: list[Difference] = []
    else:
        lines += [f"Predicted for {against.machine} (constants: {against.source}); measured on {device}.", ""]
        found = differences(results, against.constants)
    if found:
        outside = sum(not each.inside for each in found)
        lines += [
            f"## What differs from the prediction\n\n{outside} of {len(found)} figures are outside of the range of the "
            "prediction. Ranked by the time that a step loses or wins; a kernel's is that of all its layers, and is "
            "part of its step's.\n",
            *table(found),
            "",
        ]
    lines += ["## Goals", "", *goals(results, found), ""]
    lines += _steps(results)
    kernels = [file for _, file in results.stages["kernels"]]
    torch = [file for _, file in results.stages["torch"]]
    for each in kernels:
        lines += ["## Attention", "", *attention_table(each, merged(torch)), ""]
    return lines + _throughput(results)


def _stages(results: Results) -> list[str]:
    lines = ["| stage | files |", "| --- | --- |"]
    for stage, what in STAGES.items():
        names = ", ".join(path.name for path, _ in results.stages[stage]) or "**missing**"
        lines.append(f"| {what} | {names} |")
    if results.unread:
        lines.append(f"| not read | {', '.join(path.name for path in results.unread)} |")
    return lines


def goals(results: Results, found: Sequence[Difference]) -> list[str]:
    """Return the goals of docs/performance.md that these results can decide, as lines of Markdown."""
    loads = [each for each in found if each.kind == "throughput" and each.lost is not None]
    load = next((each for each in loads if re.match("gpt-oss-20b, mxfp4, .* 1024 out", each.what)), None)
    steps = {
        (row["rows"], row["context"]): (row, file["roof"])
        for path, file in results.stages["steps"]
        if model_of(path, file) == "gemma-3-27b"
        for row in file["steps"]
        if "seconds" in row and row["tokens"] == 1
    }
    share = steps[64, 8192][0]["share"] if (64, 8192) in steps else None
    lines = ["| goal | measured | reached |", "| --- | ---: | --- |"]
    cached = [row for _, file in results.stages["cached"] for row in file["cached"]]
    right = sum(not row["wrong"] for row in cached)
    shown = f"{right} of {len(cached)} cases" if cached else None
    lines.append(_goal("cached = cold", right if cached else None, len(cached), shown))
    for tokens in (13_858, 20_000):
        goal = f"gpt-oss-20b, MXFP4, 1k in and 1k out: {tokens:,} output tokens/s"
        shown = None if load is None else f"{load.measured:,.0f} ({load.what.split(', ', 2)[2]})"
        lines.append(_goal(goal, None if load is None else load.measured, tokens, shown))
    for wanted in (0.82, 0.88):
        goal = f"gemma-3-27b, decode, 64 x 8,192: {wanted:.0%} of the roof of the run"
        lines.append(_goal(goal, share, wanted, None if share is None else f"{share:.0%}"))
    lines.append(
        f"| gemma-3-27b, decode: a longer context adds the bytes of the full layers only | {_growth(steps)} | |"
    )
    return lines


def _goal(goal: str, value: float | None, wanted: float, shown: str | None) -> str:
    reached = "" if value is None else "yes" if value >= wanted else "no"
    return f"| {goal} | {shown or 'missing'} | {reached} |"


def _growth(steps: Mapping[tuple[int, int], tuple[Mapping[str, Any], Mapping[str, float]]]) -> str:
    """Return at which share of a copy's bandwidth the bytes that a longer context adds are read."""
    for rows in sorted({rows for rows, _ in steps}, reverse=True):
        contexts = sorted(context for each, context in steps if each == rows and context >= 8192)
        if len(contexts) > 1:
            (first, roof), (last, _) = steps[rows, contexts[0]], steps[rows, contexts[-1]]
            seconds = last["seconds"]["median"] - first["seconds"]["median"]
            share = (last["bytes"] - first["bytes"]) / roof["copy_bytes_per_s"] / seconds
            return f"{rows} rows, {contexts[0]:,} to {contexts[-1]:,}: added bytes at {share:.0%} of a copy"
    return "missing"


def _steps(results: Results) -> list[str]:
    """Return a table of all measured steps, with the share of the roof that was measured in the same run."""
    if not results.stages["steps"]:
        return []
    head = ["model", "rows", "context", "tokens per row", "step", "launch", "share of this run's roof"]
    lines = ["## Steps", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for path, file in results.stages["steps"]:
        for row in file["steps"]:
            cells = [title_of(path, file), row["rows"], f"{row['context']:,}", row["tokens"]]
            if "seconds" in row:
                median, launch = row["seconds"]["median"], row.get("launch_seconds")
                cells += [amount(median, "s"), "" if launch is None else amount(launch, "s"), f"{row['share']:.0%}"]
            else:
                cells += [row.get("why", "not measured"), "", ""]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def attention_table(kernels: File, torch: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines of Markdown: microseconds per measure and implementation, and the first one's share of the roof."""
    rows = [(row, {**row["seconds"], **torch.get(row["label"], {})}) for row in kernels["attention"]]
    names = list(dict.fromkeys(name for _, seconds in rows for name in seconds))
    jax = (kernels.get("versions") or {}).get("jax", "of unknown version")
    lines = [
        f"{kernels.get('device', 'no device')}, jax {jax}; microseconds of one call, median",
        "",
        f"| attention | {' | '.join(names)} | share of the roof |",
        f"|{' --- |' * (len(names) + 2)}",
    ]
    for row, seconds in rows:
        cells = [_microseconds(seconds.get(name)) for name in names]
        share = _share(row, seconds.get(names[0]), kernels["ceilings"])
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {share} |")
    return lines


def merged(torch: Sequence[File]) -> dict[str, dict[str, Any]]:
    """Return the seconds of all files of `benchmarks.gpu.torch_attention` by label."""
    return {row["label"]: row["seconds"] for file in torch for row in file["attention"]}


def _microseconds(seconds: Any) -> str:
    return f"{1e6 * seconds['median']:.1f}" if isinstance(seconds, dict) else "not measured"


def _share(row: Mapping[str, Any], seconds: Any, ceilings: Mapping[str, float]) -> str:
    if not isinstance(seconds, dict):
        return "not measured"
    least = max(row["bytes"] / ceilings["copy_bytes_per_s"], row["flops"] / ceilings["flops"])
    return f"{least / seconds['median']:.0%}"


def _throughput(results: Results) -> list[str]:
    """Return a table of the throughput of the engine and of transformers."""
    lines = []
    for path, file in results.stages["offline"]:
        for kind in ("batched", "alone"):
            rate = file[kind]["tokens_per_s"]
            lines.append(f"| jswa, {kind} | {title_of(path, file)} | {_spread(rate)} |")
    for path, file in results.stages["peer"]:
        lines.append(f"| transformers | {title_of(path, file)} | {_spread(file['tokens_per_s'])} |")
    head = ["## Throughput", "", "| engine | model | tokens/s, in and out |", "| --- | --- | ---: |"]
    return [*head, *lines, ""] if lines else []


def _spread(rate: Mapping[str, float]) -> str:
    return f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})"


def draw(results: Results, against: Reference, out: Path) -> list[str]:
    """Write the plots that the results suffice for, and return their names."""
    device, drawn = ", ".join(results.devices), []
    for number, (_, file) in enumerate(results.stages["kernels"]):
        if plots.roofline_points(file):
            drawn.append("roofline.png" if number == 0 else f"roofline-{number}.png")
            plots.plot_roofline(file, out / drawn[-1])
    if lines := plots.step_lines(results, against.constants):
        plots.plot_steps(lines, device, against.machine, out / "steps.png")
        drawn.append("steps.png")
    bars = plots.scope_bars(results, against.constants)
    if bars and against.machine is not None:
        plots.plot_scopes(bars, against.machine, out / "scopes.png")
        drawn.append("scopes.png")
    return drawn


def main(words: Sequence[str] | None = None) -> None:
    """Write the report and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with result files")
    parser.add_argument("--out", type=Path, help="folder to write, by default the same")
    parser.add_argument(
        "--predicted", type=Path, help="take the constants from this file of benchmarks.predict.figures"
    )
    parser.add_argument("--machine", choices=sorted(MACHINES), help="compare with this machine, whatever the device")
    args = parser.parse_args(words)
    try:
        results = read_folder(args.folder)
        if len(results.missing) == len(STAGES):
            raise ValueError(f"{args.folder} has no result file of {', '.join(STAGES)}")
        against = reference(results, args.machine, args.predicted)
    except ValueError as error:
        parser.error(str(error))
    out: Path = args.out or args.folder
    out.mkdir(parents=True, exist_ok=True)
    lines = markdown(results, against)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install matplotlib)")
    else:
        lines += [f"![]({name})" for name in draw(results, against, out)]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
