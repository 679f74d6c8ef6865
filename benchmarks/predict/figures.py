"""Predicted figures of released models on one GPU, to be compared with measurements. Nothing in them was measured.

    python -m benchmarks.predict.figures [--json FILE]

Prints tables (docs/performance.md has them) and writes the result file, with all constants. The published file is
benchmarks/results/predicted/h200.json.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.predict.constants import H200, Constants, Machine, at_each_end
from benchmarks.predict.counts import FORMATS, Formats, expert_numbers, matrices_of
from benchmarks.predict.step import (
    COMPILED,
    Drawing,
    Load,
    Setting,
    Work,
    predict,
    range_of,
    roof_of,
    seconds_of,
    setting,
    works_of,
)
from jswa.cache.layout import KVLayout
from jswa.config import EngineConfig
from jswa.model.hf.config import parse_config
from tools.cases.hub_configs import CONFIGS

Row = dict[str, Any]
PUBLISHED = COMPILED.with_name("h200.json")
CHUNK = 2048  # tokens of a step: max_num_batched_tokens of the engine on a GPU
_PROMPT = 8192
_OSS = ("gpt-oss-20b", "gpt-oss-120b")
_BOTH: tuple[Drawing, ...] = ("greedy", "top-p")
# (model, formats, load)
DECODE = (
    *((name, "mxfp4", Load(rows, 1536, 1, drawing)) for name in _OSS for rows in (1, 64, 256) for drawing in _BOTH),
    *(("gemma-3-27b", "bf16", Load(64, 8192, 1, drawing)) for drawing in _BOTH),
    *(("gemma-3-27b", "bf16", Load(rows, context)) for rows, context in ((1, 8192), (64, 131_072), (6, 131_072))),
    *(("gemma-3-27b", formats, Load(64, 8192)) for formats in ("fp8", "fp8, fp8 KV")),
    *(("Mistral-7B-v0.1", "bf16", Load(rows, context)) for rows, context in ((1, 1536), (256, 1536), (64, 8192))),
)
PREFILL = (*((name, "mxfp4") for name in _OSS), ("gemma-3-27b", "bf16"), ("Mistral-7B-v0.1", "bf16"))
# (model, formats, rows, tokens in, tokens out, sampling)
THROUGHPUT: tuple[tuple[str, str, int, int, int, Drawing], ...] = (
    *((name, "mxfp4", 256, 1024, 1024, drawing) for name in _OSS for drawing in _BOTH),
    ("gemma-3-27b", "bf16", 64, 1024, 1024, "greedy"),
    ("Mistral-7B-v0.1", "bf16", 256, 1024, 1024, "greedy"),
)


@functools.cache
def known(name: str, formats: Formats) -> Setting:
    """Return a released model as it is run."""
    return setting(name, parse_config(CONFIGS[name], weights=False), formats)


def decode_row(name: str, formats: str, load: Load, machine: Machine) -> Row:
    """Return a predicted step with its scopes."""
    of = known(name, FORMATS[formats])
    found = predict(of, load, machine.constants)
    return {
        "model": name,
        "formats": formats,
        **load._asdict(),
        "seconds": found.seconds,
        "low": found.low,
        "high": found.high,
        "roof_seconds": found.roof,
        "share_of_roof": found.roof / found.seconds,
        "fits": fits(of, load, machine.memory),
        "scopes": {work.scope: work.seconds(machine.constants) for work in works_of(of, load)},
        "roofs": {work.scope: work.roof(machine.constants) for work in works_of(of, load)},
    }


def prefill_row(name: str, formats: str, machine: Machine, prompt: int = _PROMPT) -> Row:
    """Return the predicted prefill of one prompt, in chunks."""
    works = prefill_works(known(name, FORMATS[formats]), prompt)
    low, high = range_of(lambda c: prefill_seconds(works, prompt, c), machine.constants)
    seconds, roof = prefill_seconds(works, prompt, machine.constants), roof_of(works, machine.constants)
    return {
        "model": name,
        "formats": formats,
        "prompt": prompt,
        "chunk": CHUNK,
        "seconds": seconds,
        "low": low,
        "high": high,
        "roof_seconds": roof,
        "share_of_roof": roof / seconds,
        "tokens_per_s": prompt / seconds,
    }


def prefill_works(of: Setting, prompt: int, chunk: int = CHUNK) -> list[Work]:
    """Return the work of a prompt's chunks, or of one chunk that is filled with as many short prompts as it holds."""
    return [work for load in _chunks(prompt, chunk) for work in works_of(of, load)]


def prefill_seconds(works: Sequence[Work], prompt: int, constants: Constants, chunk: int = CHUNK) -> float:
    """Return the seconds of one prompt, from the result of `prefill_works`."""
    return seconds_of(works, constants) / max(1, chunk // prompt)


def _chunks(prompt: int, chunk: int) -> Iterator[Load]:
    if prompt <= chunk:
        yield Load(chunk // prompt, prompt, prompt)
        return
    for at in range(0, prompt, chunk):
        end = min(at + chunk, prompt)
        yield Load(1, end, end - at, "greedy" if end == prompt else "none")


def throughput_row(
    name: str, formats: str, rows: int, prompt: int, output: int, drawing: Drawing, machine: Machine
) -> Row:
    """Return the predicted output tokens per second with full batches: rows at all ages, prefill between the steps."""
    of = known(name, FORMATS[formats])
    works, prefills = works_of(of, Load(rows, prompt + output // 2, 1, drawing)), prefill_works(of, prompt)

    def seconds(constants: Constants) -> tuple[float, float]:
        return seconds_of(works, constants) / rows, prefill_seconds(prefills, prompt, constants) / output

    decode, prefill = seconds(machine.constants)
    low, high = range_of(lambda c: 1 / sum(seconds(c)), machine.constants)
    return {
        "model": name,
        "formats": formats,
        "rows": rows,
        "prompt": prompt,
        "output": output,
        "drawing": drawing,
        "output_tokens_per_s": 1 / (decode + prefill),
        "low": low,
        "high": high,
        "decode_seconds_per_token": decode,
        "prefill_seconds_per_token": prefill,
    }


def fits(of: Setting, load: Load, memory: float) -> bool:
    """Whether weights and KV fit the engine's share of the memory, of which 2 % stay free; temporaries do not count."""
    matrices, layout = matrices_of(of.model), KVLayout.of(of.model, 64)
    ends = matrices.head * (1 if of.model.tie_embeddings else 2) * of.formats.ends
    dense = (matrices.qkv + matrices.o + matrices.mlp) * of.formats.weights + matrices.router * 16
    weights = (ends + dense + expert_numbers(of.model) * of.formats.of_experts) / 8
    row = layout.resident_slots(load.context) / layout.pages_per_slab * layout.slab_bytes(1) * of.formats.kv / 8
    return weights + load.rows * row <= memory * EngineConfig.gpu_memory_utilization * 0.98


def figures(machine: Machine) -> dict[str, Any]:
    """Return all figures, with the constants."""
    return {
        "measured_on_a_gpu": "nothing: times are computed from bytes, FLOP, kernels and the constants",
        "machine": machine.name,
        "constants": asdict(machine.constants),
        "decode": [decode_row(*case, machine) for case in DECODE],
        "prefill": [prefill_row(*case, machine) for case in PREFILL],
        "throughput": [throughput_row(*case, machine) for case in THROUGHPUT],
    }


def tables(found: dict[str, Any]) -> list[str]:
    """Return tables of the figures as lines of Markdown."""
    lines = [
        "| decode | rows x context | sampling | step, ms | roof, ms | share |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in found["decode"]:
        size = f"{row['rows']} x {row['context']:,}" + ("" if row["fits"] else " (does not fit)")
        lines.append(
            f"| {row['model']}, {row['formats']} | {size} | {row['drawing']} | {_ms(row)} | "
            f"{1e3 * row['roof_seconds']:.2f} | {row['share_of_roof']:.0%} |"
        )
    lines += [
        "",
        "| prefill | tokens | ms | roof, ms | share | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["prefill"]:
        lines.append(
            f"| {row['model']}, {row['formats']} | {row['prompt']:,} | {_ms(row)} | {1e3 * row['roof_seconds']:.2f} | "
            f"{row['share_of_roof']:.0%} | {row['tokens_per_s']:,.0f} |"
        )
    lines += [
        "",
        "| throughput | rows | tokens in, out | sampling | output tokens/s |",
        "| --- | ---: | --- | --- | ---: |",
    ]
    for row in found["throughput"]:
        lines.append(
            f"| {row['model']}, {row['formats']} | {row['rows']} | {row['prompt']:,}, {row['output']:,} | "
            f"{row['drawing']} | {row['output_tokens_per_s']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f}) |"
        )
    return lines


def scope_table(rows: Sequence[Row]) -> list[str]:
    """Return a table of the scopes of some steps, in milliseconds: predicted, and the roof in brackets."""
    head = [f"{row['model']}, {row['rows']} x {row['context']:,}, {row['drawing']}" for row in rows]
    lines = [f"| scope, ms (roof) | {' | '.join(head)} |", "| --- |" + " ---: |" * len(rows)]
    for scope in dict.fromkeys(scope for row in rows for scope in row["scopes"]):
        cells = [
            f"{1e3 * row['scopes'][scope]:.2f} ({1e3 * row['roofs'][scope]:.2f})" if scope in row["scopes"] else ""
            for row in rows
        ]
        lines.append(f"| {scope} | {' | '.join(cells)} |")
    return lines


def leverage_table(rows: Sequence[Row], machine: Machine, most: int = 4) -> list[str]:
    """Return a table of the constants whose ranges change a step most: those to measure first."""
    lines = ["| step | constant | ms at the ends of its range |", "| --- | --- | --- |"]
    for row in rows:
        load = Load(row["rows"], row["context"], row["tokens"], row["drawing"])
        works = works_of(known(row["model"], FORMATS[row["formats"]]), load)
        ends = [(name, seconds_of(works, a), seconds_of(works, b)) for name, a, b in at_each_end(machine.constants)]
        ends.sort(key=lambda each: -abs(each[1] - each[2]))
        what = f"{row['model']}, {row['rows']} x {row['context']:,}, {row['drawing']}"
        lines += [f"| {what} | `{name}` | {1e3 * low:.2f} to {1e3 * high:.2f} |" for name, low, high in ends[:most]]
    return lines


def _ms(row: Row) -> str:
    return f"{1e3 * row['seconds']:.2f} ({1e3 * row['low']:.1f} to {1e3 * row['high']:.1f})"


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables; write the result file if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    found = result_file.rounded(figures(H200))
    few = shown(found["decode"])
    print("\n".join([*tables(found), "", *scope_table(few), "", *leverage_table(few, H200)]))
    if args.json:
        result_file.write(args.json, found)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the steps whose scopes the document shows."""
    loads = {("gpt-oss-20b", 256, "greedy"), ("gpt-oss-20b", 256, "top-p"), ("gemma-3-27b", 64, "greedy")}
    chosen = [row for row in rows if (row["model"], row["rows"], row["drawing"]) in loads and row["context"] <= _PROMPT]
    return [row for row in chosen if row["formats"] in ("bf16", "mxfp4")]


if __name__ == "__main__":
    main()
