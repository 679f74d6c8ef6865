"""One engine in a process of its own: calls come as JSON, one a line, and so do answers.

    PYTHON -m benchmarks.real.engines.serve ENGINE FILE.gguf '{"option": "value"}'

An engine is a module of this folder whose `load(path, options)` returns an object with these methods. All take and give
token ids, so that no difference comes from a tokenizer:

* `encode(texts)`: the ids of each text, by the engine's own tokenizer;
* `greedy(prompts, steps)`: that many most likely tokens after each prompt;
* `losses(windows)`: for each window the sum of -log p of its tokens but the first;
* `timed(prompt, steps)`: the tokens, seconds to the first and seconds of the others; what an earlier call has computed
  of the prompt's beginning may be used.

and `versions`, a dict. Only transformers' has `gap(ids, first, second)`: the difference of two logits after these ids.
A call of `rest` waits until the process computes nothing, because jswa compiles beside its steps.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def memory() -> dict[str, float]:
    """Return the most memory that the process has had since the last `reset_memory`, in MiB, by kind.

    "own" leaves out pages of files that are mapped, such as weights that the kernel could drop.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        key: int(rest.split()[0]) / 1024 for key, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return {"peak": sizes["VmHWM"], "now": sizes["VmRSS"], "own now": sizes["RssAnon"]}


def shared(held: list[int], wanted: list[int]) -> int:
    """Return how many ids two texts begin with in common."""
    different = (index for index, (one, other) in enumerate(zip(held, wanted, strict=False)) if one != other)
    return next(different, min(len(held), len(wanted)))


def rest() -> None:
    """Wait until the process has computed for less than a fifth of half a second."""
    before = -1.0
    while time.process_time() - before > 0.1:
        before = time.process_time()
        time.sleep(0.5)


def reset_memory() -> None:
    """Let the peak begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Load the engine, then answer each line of stdin with one of stdout; all else that is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, path, options = sys.argv[1:]
    engine = importlib.import_module(f"benchmarks.real.engines.{name}").load(path, json.loads(options))
    reply: Any = {"versions": engine.versions}
    while True:
        print(json.dumps(reply), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        call = json.loads(line)
        match call.pop("call"):
            case "memory":
                reply = memory()
            case "reset_memory":
                reset_memory()
                reply = None
            case "rest":
                rest()
                reply = None
            case method:
                reply = getattr(engine, method)(**call)


if __name__ == "__main__":
    main()
