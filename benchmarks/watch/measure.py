"""What `benchmarks.watch.run` measures, in a process of its own: python -P measure.py PART TREE.

Each line on stdin asks for one turn, whose figures go to stdout as JSON. A part prepares before its first turn.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Figures = dict[str, float]
ROWS = (16, 256, 1400)
CONTEXT = 2_000  # tokens of each row
PROMPT, SHORT, ANSWER = 256, 16, 96  # tokens: of prompts that are computed, and before and of an answer
AT_A_TIME = 16
# (workload of `cache.radix`, or the share of live traffic in `cache.live`; model)
TRACES: tuple[tuple[str | float, str], ...] = (
    ("sessions in any order, 300 %", "gpt-oss-20b"),
    ("the same, sessions at 200 %", "MiMo-V2-Flash"),
    ("64 questions, one system prompt", "gemma-3-27b"),
    (2.0, "gemma-3-27b"),
)
_START = """
import jswa
from pathlib import Path

with jswa.LLM("tiny", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512) as llm:
    (found,) = llm.generate([[100] * 80], jswa.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(found.outputs[0].token_ids) == 8
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)
"""


def host() -> Iterator[Figures]:
    """Yield processor µs of the host in a decode step: plan, pack and apply."""
    from benchmarks.speed.host_overhead import decode

    while True:
        totals = {rows: decode(rows, CONTEXT, blocked=False)["total"] for rows in ROWS}
        yield {f"host of a step, {rows} rows: processor µs": total for rows, total in totals.items()}


def cpu() -> Iterator[Figures]:
    """Yield µs a token of prefill and decode of two small models on a CPU, by the processor's and the wall's clock."""
    import numpy as np

    from benchmarks.speed.offline import TimedRunner, run
    from jswa.llm import LLM
    from tools.cases.small_models import SMALL_MODELS

    random, models = np.random.default_rng(0), {}
    for name, config in SMALL_MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            sizes = {"max_num_seqs": AT_A_TIME, "max_num_batched_tokens": 512, "max_model_len": 512}
            engine = LLM(folder, load_format="dummy", prefix_cache=False, **sizes).engine
        engine.stepping.runner = timed = TimedRunner(engine.runner)
        models[name] = engine, timed
    loads = {"prefill": (PROMPT, 1, AT_A_TIME * PROMPT), "decode": (SHORT, ANSWER, AT_A_TIME * ANSWER)}
    while True:
        found: Figures = {}
        for name, (engine, timed) in models.items():
            for kind, (prompt, answer, tokens) in loads.items():
                prompts = random.integers(3, engine.model.vocab_size, (AT_A_TIME, prompt)).tolist()
                begin = time.process_time()
                seconds = run(engine, timed, prompts, answer)["seconds"]
                used = time.process_time() - begin
                found[f"{kind}, small {name}: processor µs a token"] = 1e6 * used / tokens
                found[f"{kind}, small {name}: µs a token"] = 1e6 * seconds / tokens
        yield found


def start() -> Iterator[Figures]:
    """Yield seconds of a process that makes an engine on `tiny` and answers, without and with kept programs; its MB."""
    while True:
        found: Figures = {}
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                environment = {**os.environ, "JSWA_COMPILATION_CACHE": folder}
                begin, used = time.perf_counter(), _of_children()
                command = [sys.executable, "-P", "-c", _START]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found[f"start, {kind}: processor s"] = _of_children() - used
                found[f"start, {kind}: s"] = time.perf_counter() - begin
                found.setdefault("peak memory of a cold start: MB", float(done.stdout.split()[-1]))
        yield found


def _of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def hits() -> Iterator[Figures]:
    """Yield the prompt tokens that the prefix cache finds in four traces."""
    from benchmarks.cache.radix import WORKLOADS, Workload, engine
    from benchmarks.cache.replay import replay
    from benchmarks.cache.traces import Mix, expand

    while True:
        found: Figures = {}
        for trace, model in TRACES:
            work = WORKLOADS[trace] if isinstance(trace, str) else Workload(Mix(trace).lines)
            requests = expand(work.lines())
            longest = max(len(request.prompt) + len(request.output) for request in requests)
            cache = engine(model, work.tokens, work.running, longest)
            result = replay(cache, requests, running=work.running, barrier=work.barrier)
            name = trace if isinstance(trace, str) else f"live traffic, {100 * trace:.0f} %"
            found[f"{name}; {model}: tokens found of {result.prompt:,}"] = result.cached
        yield found


def gpu() -> Iterator[Figures]:
    """Yield nodes and ptxas calls of two programs for an H200; see `gpu_programs`."""
    from benchmarks.watch.gpu_programs import figures

    while True:
        yield figures()


def reading() -> Iterator[Figures]:
    """Yield what a reader of a decode step reads."""
    from tools.read_step import functions_of, sums, watched

    while True:
        yield {f"a decode step: {name}": float(count) for name, count in sums(functions_of(watched())).items()}


PARTS: dict[str, Callable[[], Iterator[Figures]]] = {
    part.__name__: part for part in (host, cpu, start, hits, gpu, reading)
}


def require_from(tree: Path) -> None:
    """Raise SystemExit unless jswa and its kernels are imported from this tree."""
    import jswa
    import pallas_kernels

    for module in (jswa, pallas_kernels):
        file = Path(module.__file__ or "").resolve()
        if not file.is_relative_to(tree.resolve()):
            raise SystemExit(f"{module.__name__} is imported from {file}, not from {tree}")


def main() -> None:
    """Answer each line of stdin with the figures of a turn."""
    part, tree = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    require_from(Path(tree))
    turns = PARTS[part]()
    for _ in sys.stdin:
        print(json.dumps(next(turns)), file=answers, flush=True)


if __name__ == "__main__":
    main()
