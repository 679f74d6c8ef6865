"""What a step in two halves costs: decode steps of `tiny` as one program and in halves, in one engine, by turns.

    python -m benchmarks.masks.split_step [--rows 8 64] [--masked 1 64] [--steps 96] [--repeats 7] [--json FILE]

All rows run the same prompts. In the split rounds some of them have a bad word of two tokens, which their texts never
begin, so the tokens are the same; each of their masks is looked at in every step. Prints the medians of the time per
step and of the host's part of it (plan, masks, launch, apply; not the wait), and their ratios by round.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from jswa.llm import LLM
from jswa.types import SamplingParams


def measure(llm: LLM, rows: int, masked: int, steps: int) -> tuple[float, float, list[list[int]]]:
    """Return the seconds of a step, those of them that the host works, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    words: tuple[tuple[int, ...], ...] = ((1, 1),)  # the end token twice: no text goes on behind an end token
    before, engine = llm.engine.step_stats(), llm.engine
    found: dict[str, list[int]] = {str(row): [] for row in range(rows)}
    for row in range(rows):
        prompt = [3 + row, 40 + row % 7, 99]
        bad = words if row < masked else ()
        engine.add(engine.request(str(row), np.array(prompt, np.int32), params, bad_words=bad))
    for _ in range(4):  # prompts
        _note(found, engine.step())
    begin, first = time.perf_counter(), engine.step_stats()
    while engine.has_work():
        _note(found, engine.step())
    seconds, after = time.perf_counter() - begin, engine.step_stats()
    assert after.compiled_in_steps == before.compiled_in_steps, "a program was compiled meanwhile"
    count = after.steps - first.steps
    host = sum(getattr(after, part) - getattr(first, part) for part in ("plan", "launch", "apply"))
    return seconds / count, host / count, list(found.values())


def _note(found: dict[str, list[int]], events: Any) -> None:
    for event in events:
        found[event.request_id].append(event.token)


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="rows of a step")
    parser.add_argument("--masked", type=int, nargs="+", default=[1, 64], help="rows of them with a bad word, at most")
    parser.add_argument("--steps", type=int, default=96, help="tokens of each row")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    results = []
    for rows in args.rows:
        options: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 256, "max_model_len": 512}
        with LLM("tiny", prefix_cache=False, cudagraph_capture_sizes=(rows, 256), **options) as llm:
            llm.engine.prepare(SamplingParams(bad_words=["never"]))
            for masked in sorted({min(masked, rows) for masked in args.masked}):
                rounds = [[measure(llm, rows, some, args.steps) for some in (0, masked)] for _ in range(args.repeats)]
                assert all(whole[2] == split[2] for whole, split in rounds), "tokens differ"
                results.append(_summary(rows, masked, [[r[:2] for r in pair] for pair in rounds[1:]]))
    if args.json:
        result_file.write(args.json, {"steps": results})


def _summary(rows: int, masked: int, rounds: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Print and return medians of the rounds: (seconds, host) of the whole step, then of the halves."""
    whole, split = ([1e6 * statistics.median(pair[i][n] for pair in rounds) for n in (0, 1)] for i in (0, 1))
    ratios = sorted(pair[1][0] / pair[0][0] for pair in rounds)
    more = sorted(1e6 * (pair[1][1] - pair[0][1]) for pair in rounds)
    ratio, host = statistics.median(ratios), statistics.median(more)
    print(
        f"{rows} rows, {masked} masked: {whole[0]:.0f} µs a step as one program, {split[0]:.0f} in halves; ratio "
        f"{ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); host {whole[1]:.0f} and {split[1]:.0f} µs, "
        f"{host:.0f} more ({more[0]:.0f} to {more[-1]:.0f})"
    )
    return {
        "rows": rows, "masked": masked, "whole_us": whole[0], "split_us": split[0], "ratio": ratio,
        "ratio_range": [ratios[0], ratios[-1]], "host_whole_us": whole[1], "host_split_us": split[1],
        "host_more_us": host,
    }  # fmt: skip


if __name__ == "__main__":
    main()
