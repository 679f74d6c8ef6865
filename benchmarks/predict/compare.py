"""Measured figures beside predicted ones: steps, attention kernels, throughput, and the machine's own rates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.predict.constants import Constants
from benchmarks.predict.counts import FORMATS, attentions, mixtures
from benchmarks.predict.figures import CHUNK, known, prefill_seconds, prefill_works
from benchmarks.predict.results import File, Results, formats_of, model_of, options
from benchmarks.predict.step import (
    Load,
    Work,
    attention_of,
    expert_shares,
    predict,
    range_of,
    rounding,
    seconds_of,
    works_of,
)
from jswa.architecture import Reach
from tools.cases.hub_configs import CONFIGS
from tools.cases.kernels.experts import LAYERS, Layer


@dataclass(frozen=True)
class Difference:
    """A measured figure beside its prediction.

    Attributes:
        kind: "step", "kernel", "throughput" or "machine".
        unit: of all figures.
        low, high: the range of the prediction.
        lost: milliseconds per step that the measurement takes longer; None if it belongs to no step.
        roof: seconds at the roof, of steps only.
    """

    kind: str
    what: str
    unit: str
    measured: float
    predicted: float
    low: float
    high: float
    lost: float | None
    roof: float | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @property
    def inside(self) -> bool:
        """Whether the measurement is within the range of the prediction."""
        return self.low <= self.measured <= self.high


def differences(results: Results, constants: Constants) -> list[Difference]:
    """Return all comparisons, those that lose or win most time per step first, then the others by their ratio."""
    stages = results.stages
    found = [
        *(each for path, file in stages["steps"] for each in step_differences(path, file, constants)),
        *(each for _, file in stages["kernels"] for each in kernel_differences(file, constants)),
        *(each for _, file in stages["experts"] for each in expert_differences(file, constants)),
        *(each for path, file in stages["offline"] for each in throughput_differences(path, file, constants)),
        *machine_differences(results, constants),
    ]
    return sorted(found, key=lambda each: (each.lost is None, -abs(each.lost or 0), -abs(each.ratio - 1)))


def step_differences(path: Path, file: File, constants: Constants) -> Iterator[Difference]:
    """Compare the steps of a file, all greedy."""
    name, formats = model_of(path, file), formats_of(file)
    if name is None or formats is None:
        return
    for row in file["steps"]:
        if "seconds" not in row:
            continue
        load = Load(row["rows"], row["context"], row["tokens"])
        found = predict(known(name, FORMATS[formats]), load, constants)
        measured = row["seconds"]["median"]
        yield Difference(
            "step",
            f"{name}, {formats}, {load.rows} x {load.context:,}" + (f", chunk of {load.tokens:,}" * (load.tokens > 1)),
            "s",
            measured,
            found.seconds,
            found.low,
            found.high,
            1e3 * (measured - found.seconds),
            found.roof,
        )


def kernel_differences(file: File, constants: Constants) -> Iterator[Difference]:
    """Compare the first implementation of each attention measure."""
    for row in file["attention"]:
        implementation, seconds = next(iter(row["seconds"].items()))
        if not isinstance(seconds, Mapping):
            continue
        work = kernel_work(row)
        predicted, (low, high) = work.seconds(constants), range_of(work.seconds, constants)
        calls = calls_of(row["label"])
        lost = None if calls is None else 1e3 * calls * (seconds["median"] - predicted)
        what = f"{row['label']} ({implementation})"
        yield Difference("kernel", what, "s", seconds["median"], predicted, low, high, lost)


def kernel_work(row: Mapping[str, Any]) -> Work:
    """Return the work of one call of attention, from a row of `kernels.json`."""
    layer, queries = row["layer"], row["queries"]
    _, kv_heads, head_dim, v_dim = layer["heads"]
    size = layer.get("window") or layer.get("chunk")
    reach = Reach(size, chunked=not layer.get("window")) if size else None
    bits = 8 if str(layer.get("kv_dtype", "")).startswith("float8") else 16
    keys = layer["batch"] * rounding(layer["context"], reach, layer["page_size"])
    more = keys * kv_heads * (layer.get("row") or head_dim + v_dim) * bits / 8
    prefill = reach if queries > 1 else None
    return attention_of("attention", row["bytes"], more, row["flops"], 1, head_dim, bits, prefill)


def expert_differences(file: File, constants: Constants) -> Iterator[Difference]:
    """Compare the default tuning of each product of experts; a layer's two products have a row each."""
    for row in file["experts"]:
        layer = next((each for each in LAYERS if each.name == row["layer"]), None)
        if layer is None:
            continue
        work = expert_work(layer, row)
        measured, predicted = row["default"]["median"], work.seconds(constants)
        low, high = range_of(work.seconds, constants)
        name = layer.name.partition(",")[0]
        calls = len(mixtures(known(name, FORMATS["bf16"]).model)) if name in CONFIGS else None
        lost = None if calls is None else 1e3 * calls * (measured - predicted)
        what = f"{layer.name}, {row['matrix']}, {row['tokens']} tokens"
        yield Difference("kernel", what, "s", measured, predicted, low, high, lost)


def expert_work(layer: Layer, row: Mapping[str, Any]) -> Work:
    """Return the work of one product of experts; "up" has gates and ups."""
    tokens, matrices = row["tokens"], 2 if row["matrix"] == "up" else 1
    flops = 2.0 * tokens * layer.top_k * layer.d_model * layer.hidden * matrices
    shares = expert_shares(tokens, layer.top_k, layer.experts, round(layer.bits))
    return Work("experts", row["bytes"], row["bytes"], flops, shares, ((1, "gemm_start"),))


def calls_of(label: str) -> int | None:
    """Return how many layers of a released model are those of a measure; None if the label names none."""
    name, _, kind = label.partition(",")[0].rpartition(" ")
    name, kind = (name, kind) if kind in ("full", "local") else (label.partition(",")[0], "local")
    model = next((each for each in CONFIGS if each == name or each.startswith((f"{name}/", f"{name}-v"))), None)
    return None if model is None else len(attentions(known(model, FORMATS["bf16"]).model, kind))  # type: ignore[arg-type]


def throughput_differences(path: Path, file: File, constants: Constants) -> Iterator[Difference]:
    """Compare the whole load of a file, and its prefill."""
    name, formats, given = model_of(path, file), formats_of(file), options(file)
    needed = ("--prompts", "--input", "--output", "--max-num-seqs")
    if name is None or formats is None or not all(option in given for option in needed):
        return
    prompts, longest, first, most = (int(given[option]) for option in needed)
    of, what, mean = known(name, FORMATS[formats]), f"{name}, {formats}", longest * 3 // 4  # of longest/2 to longest
    chunk = int(given.get("--max-num-batched-tokens", CHUNK))
    prefill = prefill_works(of, mean, chunk)
    for output, figures in file.get("by_output", {first: file["batched"]}).items():
        made, steps = prompts * int(output), -(-prompts // most) * int(output)
        decode = works_of(of, Load(min(prompts, most), mean + int(output) // 2))

        def seconds(c: Constants, decode: tuple[Work, ...] = decode, steps: int = steps) -> float:
            return steps * seconds_of(decode, c) + prompts * prefill_seconds(prefill, mean, c, chunk)

        measured, predicted = figures["seconds"]["median"], seconds(constants)
        fast, slow = (made / end for end in range_of(seconds, constants))
        load, lost = f"{what}, {prompts} prompts of {mean}, {output} out", 1e3 * (measured - predicted) / steps
        yield Difference("throughput", load, "tok/s", made / measured, made / predicted, slow, fast, lost)

    def of_prefill(c: Constants) -> float:
        return mean / prefill_seconds(prefill, mean, c, chunk)

    rate, (low, high) = file["batched"]["prefill_tokens_per_s"]["median"], range_of(of_prefill, constants)
    yield Difference("throughput", f"{what}, prefill", "tok/s", rate, of_prefill(constants), low, high, None)


def machine_differences(results: Results, constants: Constants) -> Iterator[Difference]:
    """Compare the rates of a copy and of a matrix product that the runs have measured."""
    low, high = range_of(lambda c: c.copy, constants), range_of(lambda c: c.matmul, constants)
    rated = [*results.stages["experts"], *results.stages["kernels"]]
    rates = [(f"{path.name}: ", file["ceilings"]) for path, file in rated]
    rates += [(f"{path.name}: ", file["roof"]) for path, file in results.stages["steps"]]
    for where, rate in rates:
        copied, product = rate["copy_bytes_per_s"], rate["flops"]
        yield Difference("machine", f"{where}large copy", "B/s", copied, constants.copy, *low, None)
        yield Difference("machine", f"{where}matrix product", "FLOP/s", product, constants.matmul, *high, None)


def table(found: Sequence[Difference]) -> list[str]:
    """Return the comparisons as lines of Markdown."""
    lines = [
        "| | measured | predicted | ratio | lost, ms per step | within the range |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in found:
        lost = "" if each.lost is None else f"{each.lost:+.2f}"
        lines.append(
            f"| {each.what} | {amount(each.measured, each.unit)} | {amount(each.predicted, each.unit)} "
            f"({amount(each.low, each.unit)} to {amount(each.high, each.unit)}) | {each.ratio:.2f} | {lost} | "
            f"{'yes' if each.inside else '**no**'} |"
        )
    return lines


def amount(value: float, unit: str) -> str:
    """Return a figure with a unit that fits its size."""
    if unit == "s":
        return f"{1e3 * value:.2f} ms" if value >= 1e-3 else f"{1e6 * value:.1f} µs"
    return f"{value / 1e12:.2f} T{unit}" if value >= 1e11 else f"{value:,.0f} {unit}"
