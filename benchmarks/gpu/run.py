"""Runner of all tests and benchmarks that need a GPU, in stages. `make gpu` calls it.

    python -m benchmarks.gpu.run --out DIR [--stages NAME ...]

Each stage is a process with a time limit, and writes its log and its JSON to DIR:

    facts      benchmarks.gpu.facts: device, versions, the compiler's target description, time to launch a program
    numerics   tests of all kernel cases against their oracles, on the device
    matrix     tests of attention with all combinations of head size, window, page, group and length
    kernels    benchmarks.gpu.kernels
    torch      benchmarks.gpu.torch_attention, baselines of `kernels`
    tune       benchmarks.gpu.autotune
    steps      benchmarks.gpu.decode_steps on random weights in the shapes of released models
    offline    benchmarks.speed.offline on the same models
    peer       benchmarks.gpu.peer_transformers, the baseline of `offline`
    report     benchmarks.predict.report: tables, plots, what differs from the prediction

A stage that fails does not stop the others. A short table is printed at the end. The exit status is that of `numerics`.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_MODELS = ("gemma-3-27b", "gpt-oss-20b", "Mistral-7B-v0.1")


@dataclass(frozen=True)
class Stage:
    """A command and the seconds that it may take."""

    name: str
    command: tuple[str, ...]
    seconds: int


def stages(out: Path) -> list[Stage]:
    """Return all stages in their order."""
    cases = (
        "tests/unit/pallas_kernels/attention/test_paged_attention.py",
        "tests/unit/pallas_kernels/experts/test_grouped_matmul.py",
    )
    matrix = "tests/unit/pallas_kernels/attention/test_hopper.py"
    load = ("--prompts", "256", "--input", "1024", "--output", "1024", "--repeats", "2")
    offline = (*load, "--max-num-seqs", "256")
    return [
        Stage("facts", ("-m", "benchmarks.gpu.facts", "--json", f"{out}/facts.json"), 120),
        Stage("numerics", ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *cases), 300),
        Stage("matrix", ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly", matrix), 580),
        Stage("kernels", ("-m", "benchmarks.gpu.kernels", "--json", f"{out}/kernels.json"), 300),
        Stage("torch", ("-m", "benchmarks.gpu.torch_attention", "--json", f"{out}/torch.json"), 240),
        Stage("tune", ("-m", "benchmarks.gpu.autotune", "--seconds", "400", "--out", f"{out}/tuning.json"), 560),
        *(
            Stage(
                f"steps-{name}",
                ("-m", "benchmarks.gpu.decode_steps", "--hub", name, "--json", f"{out}/steps-{name}.json"),
                400,
            )
            for name in _MODELS
        ),
        *(
            Stage(
                f"offline-{name}",
                ("-m", "benchmarks.speed.offline", "--hub", name, *offline, "--json", f"{out}/offline-{name}.json"),
                280,
            )
            for name in _MODELS
        ),
        *(
            Stage(
                f"peer-{name}",
                ("-m", "benchmarks.gpu.peer_transformers", "--hub", name, *load, "--json", f"{out}/peer-{name}.json"),
                400,
            )
            for name in _MODELS
        ),
        Stage("report", ("-m", "benchmarks.predict.report", str(out)), 60),
    ]


def main() -> None:
    """Run the stages that --stages names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--stages",
        nargs="+",
        default=["facts", "numerics", "kernels", "torch", "report"],
        help="names, or their beginnings",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    unknown = {name for name in args.stages if not any(s.name.startswith(name) for s in stages(args.out))}
    if unknown:
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}")
    done: dict[str, tuple[int, float]] = {}
    for stage in stages(args.out):
        if any(stage.name.startswith(name) for name in args.stages):
            done[stage.name] = run(stage, args.out)
    for name, (status, seconds) in done.items():
        print(f"{name:24} {'ok' if status == 0 else f'status {status}':12} {seconds:6.0f} s")
    sys.exit(done.get("numerics", (0, 0.0))[0])


def run(stage: Stage, out: Path) -> tuple[int, float]:
    """Run a stage; return its exit status (124: out of time) and seconds. Writes its log and prints the end of it."""
    start, log = time.perf_counter(), out / f"{stage.name}.log"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [sys.executable, *stage.command],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=stage.seconds,
                env={"JAX_PLATFORMS": "cuda", **os.environ},  # tests run on the CPU by default
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    print(f"== {stage.name}", *log.read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)
    return status, time.perf_counter() - start


if __name__ == "__main__":
    main()
