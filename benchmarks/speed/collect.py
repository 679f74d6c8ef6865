"""Processor time of `LLM.generate` a token, without streaming, with an engine that does nothing.

    python -m benchmarks.speed.collect [--rows 256 1400] [--tokens 256] [--cases arrays objects] [--json FILE]

All prompts begin in the first step. The time of the call is divided by its tokens; what the engine itself takes is
subtracted, all else counts: making requests, distributing events, decoding, outputs. "arrays" are the engine's events
of a decode step, "objects" the same as one `TokenEvent` a token, "stop string" and "logprobs" need each token when it
comes. The baseline of the same run is a loop that appends each token to a list of its row: it shows how fast the
machine is at the time. Prints medians of the rounds, in µs a token. The time is the process's, of all its threads: what
else runs on the machine matters little.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.llm import LLM
from jswa.plan import ChoiceLogprobs, Request, StepEvents, TokenEvent
from jswa.types import PrefixHit, SamplingParams

ROUNDS = 3
PROMPT = 16  # tokens
TEXT = "The girl and her cat went to the lake, where an old man had lost his boat. "
LOGPROBS = ChoiceLogprobs(100, -1.0, 1, (100,), (-1.0,))
CASES: dict[str, dict[str, Any]] = {
    "arrays": {},
    "objects": {},
    "stop string": {"stop": "no such text"},
    "logprobs": {"logprobs": 1},
}


class NoEngine:
    """An engine whose rows all generate the same text from different words on, a token a step, until `max_tokens`.

    Attributes:
        seconds: time that its own methods have taken.
        arrays: whether tokens that are neither first nor last come in arrays.
        turnover: says that the engine is never paused.
    """

    def __init__(self, text: Int[np.ndarray, " N"], *, arrays: bool) -> None:
        self.seconds = 0.0
        self.arrays = arrays
        self.turnover = SimpleNamespace(paused=False)
        self._text = text
        self._rows: list[Request] = []
        self._names = np.zeros(0, object)
        self._step = 0

    def request(self, request_id: str, prompt: Any, params: SamplingParams, **_: object) -> Request:
        """Make a request without any checks."""
        return Request(request_id, prompt, params, frozenset(), (0, 0), PROMPT + (params.max_tokens or 0))

    def add(self, request: Request) -> None:
        """Begin a row."""
        self._rows.append(request)

    def abort(self, _: str) -> None:
        """Do nothing: a row ends by itself."""

    def step(self) -> StepEvents:
        """Generate a token of each row."""
        begin = time.process_time()
        if self._step == 0:
            self._names = np.array([row.request_id for row in self._rows], object)
        self._step += 1
        params = self._rows[0].params
        tokens = self._text[(np.arange(len(self._rows)) * 7 + self._step) % len(self._text)]
        last = self._step == params.max_tokens
        if self.arrays and self._step > 1 and not last:
            events = StepEvents(self._names, tokens)
        else:
            hit = PrefixHit(PROMPT, 0, 0, 0, "cold")
            more: dict[str, Any] = {"first_scheduled_time": 1.0, "prefix": hit} if self._step == 1 else {}
            more |= {"finish_reason": "length"} if last else {}
            more |= {} if params.logprobs is None else {"logprobs": LOGPROBS}
            pairs = zip(self._names.tolist(), tokens.tolist(), strict=True)
            events = StepEvents(others=tuple(TokenEvent(name, token, **more) for name, token in pairs))
        if last:
            self._rows, self._step = [], 0
        self.seconds += time.process_time() - begin
        return events


def measure(llm: LLM, rows: int, tokens: int, case: str) -> float:
    """Return the median µs a token of one case."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **CASES[case])
    assert llm.tokenizer is not None
    text = llm.tokenizer.encode(TEXT)
    engine = NoEngine(text, arrays=case not in ("objects", "logprobs"))
    prompts = [np.roll(text, row)[:PROMPT] for row in range(rows)]
    made = llm.with_engine(cast(Any, engine))

    def call() -> float:
        begin, before = time.process_time(), engine.seconds
        made.generate(prompts, params, use_tqdm=False)
        return time.process_time() - begin - (engine.seconds - before)

    return median(call, rows * tokens)


def baseline(rows: int, tokens: int) -> float:
    """Return the median µs of one append to the list of a row."""
    names = [str(row) for row in range(rows)]

    def call() -> float:
        begin = time.process_time()
        lists: dict[str, list[int]] = {name: [] for name in names}
        for token in range(tokens):
            for name in names:
                lists[name].append(token)
        return time.process_time() - begin

    return median(call, rows * tokens)


def median(call: Callable[[], float], tokens: int) -> float:
    """Return the median µs a token of calls that return their seconds; the first one warms up."""
    return 1e6 * statistics.median([call() for _ in range(ROUNDS + 1)][1:]) / tokens


def main() -> None:
    """Print a line per number of rows; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1400], help="prompts of a call")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is measured")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    names = [*args.cases, "baseline"]
    print("  rows " + " ".join(f"{name:>12}" for name in names) + "   µs a token")
    results = []
    with LLM("tiny", max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64) as llm:
        for rows in args.rows:
            found = {case: measure(llm, rows, args.tokens, case) for case in args.cases}
            found["baseline"] = baseline(rows, args.tokens)
            results.append({"rows": rows, "tokens": args.tokens, **found})
            print(f"{rows:6} " + " ".join(f"{found[name]:12.2f}" for name in names), flush=True)
    if args.json:
        result_file.write(args.json, {"rows": results})


if __name__ == "__main__":
    main()
