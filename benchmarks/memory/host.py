"""What host memory behind the prefix cache saves and costs on this machine, with random weights.

    python -m benchmarks.memory.host [--size tiny | 50m] [--prompt 8000] [--arena MIB] [--json FILE]

* First token: a prompt is asked, then another until the arena has lost it; then it is asked again and comes back.
* Other rows: the time of a step of 4 rows that generate, with and without a tenth of the arena per second that goes to
  host memory and a tenth that comes back. Both kinds of steps alternate, ten at a time.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.exec.host.memory import host_contents
from jswa.exec.host.pages import HostPages
from jswa.exec.runner import Runner
from jswa.llm import LLM
from jswa.plan import Transfers
from jswa.types import RequestOutput, SamplingParams

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "50m": {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
        "head_dim": 64, "num_key_value_heads": 4, "layer_types": 2 * (5 * ["sliding_attention"] + ["full_attention"]),
    },
}  # fmt: skip
SHARE = 0.1  # of the arena that is copied per second, each way
ASKED = 3  # times that a first token is measured
STEPS, SPAN = 400, 10  # steps of each kind, in turns of so many


def make_model(folder: Path, size: str) -> Path:
    """Write the config of the embedded model, of another size."""
    source = Path(__file__).parents[2] / "jswa" / "assets" / "tiny" / "config.json"
    config = json.loads(source.read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16_384, **SIZES[size]}))
    return folder


def text(seed: int, length: int) -> list[int]:
    """Return random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, 1000, length)]


def first_token(llm: LLM, length: int) -> tuple[float, float]:
    """Return the seconds to the first token of a prompt that is computed, and of one that comes back; medians."""
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    times: list[list[float]] = [[], []]

    def ask(number: int) -> RequestOutput:
        begin = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": text(number, length)}], one, use_tqdm=False)
        restored = bool(output.prefix and output.prefix.host_tokens)
        times[restored].append(time.perf_counter() - begin)
        print(f"  {1000 * times[restored][-1]:.1f} ms, {output.prefix}", flush=True)
        return output

    fit = 2 + llm.stats().total_slots // llm.engine.layout.full_pages(length)
    for number in [*range(fit), *range(ASKED)]:
        ask(number)
    return statistics.median(times[0]), statistics.median(times[1])


def other_rows(llm: LLM, length: int) -> tuple[float, float]:
    """Return the mean seconds of a step without and with copies, each way a tenth of the arena per second."""
    engine, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, Runner)
    assert engine.limits.host is not None
    pages = HostPages(runner, host_contents(engine.limits.host, runner.layout, runner.kv_dtype))
    params = SamplingParams(temperature=0.0, max_tokens=2 * STEPS + 300, ignore_eos=True)
    for number in range(4):
        engine.add(engine.request(str(number), np.array(text(number, length), np.int32), params))
    for _ in range(100):
        engine.step()
    total = engine.stats().total_slots
    seconds, begun, owed, at = [0.0, 0.0], time.perf_counter(), 0.0, 0
    for step in range(2 * STEPS):
        kind, begun = step // SPAN % 2, time.perf_counter()
        engine.step()
        if kind:
            count = int(owed // runner.slots_per_copy) * runner.slots_per_copy  # texts are copied many slots at a time
            owed -= count
            slots: Int[np.ndarray, " n"] = (at + np.arange(count)) % (total // 4) + total // 2
            at += count
            pairs = np.stack([slots, slots], axis=1).astype(np.int32)
            pages.land()
            nothing = np.zeros((0, 2), np.int32)
            pages.before_launch(Transfers(nothing, pairs, nothing))
            pages.after_launch(Transfers(nothing, nothing, pairs))
            owed += SHARE * total * (time.perf_counter() - begun)
        seconds[kind] += time.perf_counter() - begun
    for number in range(4):
        engine.abort(str(number))
    while engine.has_work():
        engine.step()
    return seconds[0] / STEPS, seconds[1] / STEPS


def main() -> None:
    """Print what was measured; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the prompt (default: 8000)")
    parser.add_argument("--arena", type=int, default=32, help="MiB of the arena (default: 32)")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            make_model(Path(folder), args.size),
            load_format="dummy",
            host_kv_bytes=4 * args.arena * 2**20,
            max_num_seqs=8,
            max_model_len=args.prompt + 1500,
            kv_cache_memory_bytes=args.arena * 2**20,
        ) as llm,
    ):
        found["computed"], found["restored"] = first_token(llm, args.prompt)
        found["step"], found["step beside copies"] = other_rows(llm, 200)
    print({name: round(1000 * value, 3) for name, value in found.items()}, "ms")
    print(f"restored / computed {found['restored'] / found['computed']:.3f}")
    print(f"slower beside copies {100 * (found['step beside copies'] / found['step'] - 1):.1f} %")
    if args.json:
        result_file.write(args.json, {"size": args.size, "prompt": args.prompt, "seconds": found})


if __name__ == "__main__":
    main()
