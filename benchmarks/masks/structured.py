"""What rows that are held to a grammar cost an engine whose step takes 5 ms, and the tokens that take no step.

    python -m benchmarks.masks.structured [--held 0 64 128 256] [--vocab 200000] [--ranks FILE] [--json FILE]

Scheduler, masks and matchers are the engine's; the device is a clock: the step before ends `step-ms` after its begin,
and each row gets a random token that its mask allows. The forward takes 95 % of a step; sampling, which waits for the
masks, the rest. All texts end and begin again. Rounds with and without grammars take turns. Prints steps per second,
their ratio, and the time to fill the masks of a step; by schema, the share of tokens that grammars force and the time
of a mask. Of the schemas, "bounded" has strings of at most 20 characters, whose masks are slow; no row is held to it.
"""

import argparse
import base64
import dataclasses
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer as Backend

from benchmarks import result_file
from benchmarks.speed.host_overhead import gemma3_27b
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.grammar.compiler import Grammars
from jswa.grammar.matching import masks
from jswa.grammar.matching.llg import THREADS
from jswa.plan import AllWords, Request, RowMask, StepPlan, StepResults
from jswa.sched import constraint
from jswa.storage.hub import TINY
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams, StructuredOutputsParams

FORWARD = 0.95  # of a step
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "city": {"type": "string"},
                },
                "required": ["street", "city"],
                "additionalProperties": False,
            },
        },
        "required": ["first_name", "age", "address"],
        "additionalProperties": False,
    },
    "labels": {
        "type": "object",
        "properties": {
            "sentiment": {"enum": ["positive", "negative", "neutral"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "categories": {"type": "array", "items": {"enum": ["sports", "politics", "science"]}, "maxItems": 3},
        },
        "required": ["sentiment", "confidence", "categories"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
}
_NAME = {"type": "string", "maxLength": 20}
BOUNDED = {"type": "object", "properties": {"name": _NAME, "city": _NAME}, "required": ["name", "city"]}


class Clock:
    """A device that only takes time. The steps follow each other; a second half begins when its masks are there."""

    def __init__(self, seconds: float, vocab: int) -> None:
        self._forward, self._rest = FORWARD * seconds, (1 - FORWARD) * seconds
        self._free = 0.0  # when the device has done what it was given
        self._stopped = 0.0  # seconds that drawing has taken, in which a device would have worked on
        self._masks: dict[int, Int[np.ndarray, " words"]] = {}
        self._vocab = vocab
        self._rng = np.random.default_rng(0)

    def now(self) -> float:
        """Return the seconds that have passed, without those in which tokens were drawn."""
        return time.perf_counter() - self._stopped

    def launch(self, plan: StepPlan) -> "Step":
        """Begin a step."""
        self._free = max(self._free, self.now()) + self._forward
        step = Step(self, plan)
        if not plan.late:
            step.finish(())
        return step

    def finish(self, masks: tuple[RowMask, ...]) -> float:
        """Return when the step ends whose masks are there now."""
        for mask in masks:
            assert isinstance(mask.words, AllWords)
            self._masks[mask.row_id] = mask.words.bits.copy()
        self._free = max(self._free, self.now()) + self._rest
        return self._free

    def draw(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return a token of each row that its mask allows."""
        begin = time.perf_counter()
        tokens = self._rng.integers(300, self._vocab, plan.num_rows).astype(np.int32)
        late = set(plan.late)
        for index, row_id in enumerate(plan.row_ids.tolist()):
            if row_id in late:
                tokens[index] = allowed_token(self._masks[row_id], self._rng)
        self._stopped += time.perf_counter() - begin
        return tokens


def allowed_token(bits: Int[np.ndarray, " words"], rng: np.random.Generator) -> int:
    """Return a random token of a mask."""
    words = np.flatnonzero(bits)
    word = int(words[rng.integers(len(words))])
    allowed: list[int] = [bit for bit in range(32) if int(bits[word]) >> bit & 1]
    return 32 * word + allowed[rng.integers(len(allowed))]


class Step:
    """A launched step."""

    def __init__(self, clock: Clock, plan: StepPlan) -> None:
        self.plan = plan
        self._clock = clock
        self._end = 0.0

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Let the device sample."""
        self._end = self._clock.finish(masks)

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Wait for the end of the step."""
        drawn = self._clock.draw(self.plan)
        time.sleep(max(0.0, self._end - self._clock.now()))
        return drawn

    def results(self) -> StepResults | None:
        """Return None."""
        return None


def wide_tokenizer(vocab: int, ranks: Path | None) -> Tokenizer:
    """Return the tokenizer of `tiny` with other tokens beside its own, until it has `vocab`.

    They are those of a file of ranks, or made up; made-up tokens make masks slow, since few of them share a beginning.
    """
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    known = json.loads(tokenizer.backend.to_str())
    pieces: dict[str, int] = known["model"]["vocab"]
    start = max(tokenizer.vocab_size, max(pieces.values()) + 1)
    if ranks is None:
        letters, rng, made = (
            np.array(list('etaoinshrdlu ,.":{}[]0123456789_')),
            np.random.default_rng(1),
            dict[str, None](),
        )
        while len(made) < vocab - start:
            made["".join(rng.choice(letters, int(rng.integers(2, 9)))).replace(" ", "Ġ")] = None
        names = list(made)
    else:
        lines = ranks.read_text().splitlines()
        names = ["".join(_LETTERS[byte] for byte in base64.b64decode(line.split()[0])) for line in lines]
    new = [name for name in names if name not in pieces][: vocab - start]
    pieces.update({name: start + index for index, name in enumerate(new)})
    return Tokenizer(Backend.from_str(json.dumps(known)))


def _byte_letters() -> dict[int, str]:
    """Return the character by which a byte-level tokenizer writes each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


_LETTERS = _byte_letters()


def add(engine: Engine, name: str, schema: str | None, like: dict[str | None, Request]) -> None:
    """Add a request of 16 tokens for a text of a schema, or for 100 tokens. Its grammar is compiled before."""
    form = None if schema is None else StructuredOutputsParams(json=SCHEMAS[schema])
    params = SamplingParams(max_tokens=100, ignore_eos=form is None, structured_outputs=form)
    prompt = np.random.default_rng(hash(name) % 2**32).integers(300, 900, 16).astype(np.int32)
    like[schema] = engine.request(name, prompt, params, like=like.get(schema))
    engine.add(like[schema])


def measure(engine: Engine, clock: Clock, rows: int, held: int, steps: int, number: int) -> dict[str, float]:
    """Run rows of which `held` are held to the schemas by turns; return steps per second and more."""
    names = list(SCHEMAS)
    kinds: dict[str, str | None] = {}
    like: dict[str | None, Request] = {}
    count, filling = 0, 0.0
    fill = masks.fill_all

    def timed(*given: Any) -> None:
        nonlocal filling
        begin = time.perf_counter()
        fill(*given)
        filling += time.perf_counter() - begin

    def begin(kind: str | None) -> None:
        nonlocal count
        name = f"{number}-{count}"
        kinds[name], count = kind, count + 1
        add(engine, name, kind, like)

    for row in range(rows):
        begin(names[row % len(names)] if row < held else None)
    for _ in range(4):
        engine.step()
    since = clock.now()
    with patch.object(constraint, "fill_all", timed):
        for _ in range(steps):
            for event in engine.step().others:
                if event.finish_reason is not None:
                    assert event.finish_reason != "error", event.error
                    begin(kinds.pop(event.request_id))
    seconds = clock.now() - since
    for name in kinds:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    return {"steps_per_s": steps / seconds, "fill_us": 1e6 * filling / steps}


def mask_times(grammars: Grammars, schema: dict[str, Any], texts: int = 10) -> dict[str, float]:
    """Return µs of a mask in random texts of a schema, in one thread: mean and 90th percentile."""
    rng, found = np.random.default_rng(0), []
    grammar = grammars.compile(StructuredOutputsParams(json=schema))
    bits = np.zeros((1, -(-grammar.vocabulary.size // 32)), np.int32)
    for _ in range(texts):
        matcher = grammar.matcher()
        for _ in range(40):
            begin = time.perf_counter()
            masks.fill_all([matcher], bits, [0], threads=1)
            found.append(1e6 * (time.perf_counter() - begin))
            if not matcher.accept([allowed_token(bits[0], rng)]) or matcher.finished:
                break
    return {"mean_us": statistics.mean(found), "p90_us": sorted(found)[len(found) * 9 // 10]}


def forced_share(engine: Engine, schema: str, texts: int = 40) -> float:
    """Return the share of the tokens of texts of a schema that no step samples."""
    forced = tokens = 0
    for text in range(texts):
        add(engine, f"{schema}-{text}", schema, {})
    while engine.has_work():
        events = list(engine.step())
        tokens += len(events)
        several = Counter(event.request_id for event in events)
        forced += sum(count - 1 for count in several.values())
    return forced / tokens


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="rows of a step")
    parser.add_argument(
        "--held", type=int, nargs="+", default=[0, 64, 128, 256], help="rows that are held to a grammar"
    )
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds of a step of the device")
    parser.add_argument("--vocab", type=int, default=200_000, help="tokens of the vocabulary")
    parser.add_argument(
        "--ranks", type=Path, help="a tiktoken file, whose tokens the vocabulary gets; else made-up ones"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    model = dataclasses.replace(gemma3_27b(), vocab_size=args.vocab, eos_token_ids=(2,))
    limits = Limits(4096, args.rows, 2048, 64, num_slabs=20_000, prefix_cache=False)
    clock = Clock(args.step_ms / 1e3, args.vocab)
    grammars = Grammars(wide_tokenizer(args.vocab, args.ranks), args.vocab, (2,))
    engine = Engine(model, limits, KVLayout.of(model, 64), clock, grammars=grammars)
    for schema in SCHEMAS:  # compiled before
        add(engine, schema, schema, {})
    while engine.has_work():
        engine.step()
    found: dict[int, list[dict[str, float]]] = {held: [] for held in args.held}
    for number in range(args.repeats):
        for held in args.held:
            found[held].append(measure(engine, clock, args.rows, held, args.steps, 1000 * number + held))
    results = []
    for held, rounds in found.items():
        ratios = sorted(
            r["steps_per_s"] / base["steps_per_s"] for r, base in zip(rounds, found[args.held[0]], strict=True)
        )
        entry = {
            "rows": args.rows, "held": held, "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]],
            **{name: statistics.median(r[name] for r in rounds) for name in rounds[0]},
        }  # fmt: skip
        results.append(entry)
        print(
            f"{held} of {args.rows} rows held: {entry['steps_per_s']:.1f} steps/s, ratio {entry['ratio']:.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}), masks of a step filled in {entry['fill_us']:.0f} µs by "
            f"{THREADS} threads"
        )
    shares = {schema: forced_share(engine, schema) for schema in SCHEMAS}
    print("tokens without a step: " + ", ".join(f"{schema} {share:.0%}" for schema, share in shares.items()))
    masks = {name: mask_times(grammars, schema) for name, schema in {**SCHEMAS, "bounded": BOUNDED}.items()}
    for name, times in masks.items():
        print(f"{name}: a mask takes {times['mean_us']:.0f} µs, 90th percentile {times['p90_us']:.0f}")
    if args.json:
        more = {"vocab": args.vocab, "step_ms": args.step_ms, "threads": THREADS, "cores": os.cpu_count()}
        result_file.write(args.json, {"held": results, "forced": shares, "masks": masks, **more})


if __name__ == "__main__":
    main()
