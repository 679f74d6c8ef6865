"""What host memory behind the prefix cache saves and costs on this machine, with random weights.

    python -m benchmarks.memory.host [--size tiny | 50m] [--prompt 8000] [--arena MIB] [--json FILE]

* First token: a prompt is asked, then another until the arena has lost it; then it is asked again and comes back.
* Other rows: the time of a step of 4 rows that generate, alone; with a tenth of the arena per second that goes to host
  memory and a tenth that comes back; and with the tenth that went there being written to files too. The three kinds of
  steps alternate, ten at a time.
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.cache.disk.records import DiskRecord
from jswa.cache.disk.store import DiskStore
from jswa.exec.host_memory import slot_contents
from jswa.exec.host_pages import HostPages
from jswa.exec.runner import Runner
from jswa.llm import LLM
from jswa.plan import Save, Transfers
from jswa.storage.identity import record_geometry
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
STEPS, SPAN = 1000, 10  # steps of each kind, in turns of so many


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


def open_store(runner: Runner, folder: Path) -> DiskStore:
    """Return files for the pages of a runner, more than are written here."""
    geometry = record_geometry({"identity": "benchmark"}, runner.layout, runner.kv_dtype)
    return DiskStore(folder, 2**36, geometry)


def save_of(store: DiskStore, slots: Int[np.ndarray, " n"], number: int) -> Save:
    """Return the writing of slots as full pages of a text of their own."""
    keys = tuple(("full", b"%08d%08d" % (number, page)) for page in range(len(slots)))
    record = DiskRecord(store.geometry.identity, b"r" * 16, keys[0][1], keys, None)
    return Save(slots, partial(store.put, record))


def other_rows(llm: LLM, length: int, folder: Path) -> list[float]:
    """Return the mean seconds of a step alone, with copies each way, and with files written too."""
    engine, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, Runner)
    assert engine.limits.host is not None
    room = engine.limits.host.slabs * runner.layout.pages_per_slab
    pages = HostPages(runner, slot_contents(room, runner.layout, runner.kv_dtype))
    store, nothing = open_store(runner, folder), np.zeros((0, 2), np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=3 * STEPS + 300, ignore_eos=True)
    for number in range(4):
        engine.add(engine.request(str(number), np.array(text(number, length), np.int32), params))
    for _ in range(100):
        engine.step()
    total = engine.stats().total_slots
    seconds, owed, at = [0.0, 0.0, 0.0], 0.0, 0
    for step in range(3 * STEPS):
        kind, begun = step // SPAN % 3, time.perf_counter()
        engine.step()
        count = int(owed // runner.slots_per_copy) * runner.slots_per_copy  # texts are copied many slots at a time
        if kind and count:
            owed -= count
            slots: Int[np.ndarray, " n"] = (at + np.arange(count)) % (total // 4) + total // 2
            at += count
            pairs = np.stack([slots, slots], axis=1).astype(np.int32)
            saves = (save_of(store, slots, step),) if kind == 2 else ()
            pages.before_launch(Transfers(nothing, pairs, nothing, (), saves))
            pages.after_launch(Transfers(nothing, nothing, pairs))
        pages.land()
        store.settle()
        if kind:
            owed += SHARE * total * (time.perf_counter() - begun)
        seconds[kind] += time.perf_counter() - begun
    for number in range(4):
        engine.abort(str(number))
    while engine.has_work():
        engine.step()
    store.close()
    print(f"  {store.written} bytes written, {store.dropped} records dropped", flush=True)
    return [value / STEPS for value in seconds]


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
            max_model_len=max(args.prompt, 200) + 3 * STEPS + 500,
            kv_cache_memory_bytes=args.arena * 2**20,
        ) as llm,
    ):
        found["computed"], found["restored"] = first_token(llm, args.prompt)
        steps = other_rows(llm, 200, Path(folder) / "files")
        found |= dict(zip(("step", "step beside copies", "step beside copies and files"), steps, strict=True))
    print({name: round(1000 * value, 3) for name, value in found.items()}, "ms")
    print(f"restored / computed {found['restored'] / found['computed']:.3f}")
    for name in ("copies", "copies and files"):
        print(f"slower beside {name}: {100 * (found[f'step beside {name}'] / found['step'] - 1):.1f} %")
    if args.json:
        result_file.write(args.json, {"size": args.size, "prompt": args.prompt, "seconds": found})


if __name__ == "__main__":
    main()
