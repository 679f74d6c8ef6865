"""A server whose device answers at once. The work of the host is real, with the KV geometry of a released model.

    python -m benchmarks.serve.noop_server [--geometry gemma-3-27b] [--rows 256] [--length 32768] [--port 0]

The tokenizer is that of `tiny`; generated tokens are letters.
"""

import argparse
import sys
import time
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from benchmarks.speed.multiturn import AnsweredStep
from jswa.cache.capacity import useful_slabs
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.plan import PLAIN, LogprobTable, StepPlan, StepResults
from jswa.ribs.table import VARIANTS
from jswa.storage.hub import TINY
from jswa.text.answers.template import compile_template, shipped
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from jswa.types import MAX_LOGPROBS
from server.core.service import Served
from server.http.process import set_up_logging
from server.options import ServeConfig
from server.processes.supervisor import run
from tools.cases.geometry import GEOMETRIES, model_of

_A = 74  # the token "a" of `tiny`; those of the other letters follow it


class Letters(AnsweredStep):
    """A finished step whose tokens are letters."""

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Return tokens that depend only on row id and position."""
        letters: Int[np.ndarray, " R"] = (self.plan.starts + self.plan.counts + self.plan.row_ids) % 26 + _A
        return letters

    def results(self) -> StepResults | None:
        """Return log probabilities, which are the same for every token; None if the plan asks for none."""
        if self.plan.variant == PLAIN:
            return None
        of_all = {"logprobs": _table(self.plan.num_tokens)[:5]} if VARIANTS[self.plan.variant].every else {}
        return StepResults({"logprobs": _table(self.plan.num_rows)[:5]}, of_all)


def _table(count: int) -> LogprobTable:
    top = np.arange(MAX_LOGPROBS)
    wide = (count, MAX_LOGPROBS)
    chosen = np.full(count, -1.234567, np.float32)
    values = np.broadcast_to((-1.234567 - top).astype(np.float32), wide)
    return LogprobTable(chosen, np.ones(count, np.int32), np.broadcast_to(top + _A, wide), values)


class Clocked(Letters):
    """A step that ends at a time of `time.perf_counter`."""

    ends = 0.0

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Wait for the step's end, and return its tokens."""
        time.sleep(max(0.0, self.ends - time.perf_counter()))
        return super().tokens()


class NoDevice:
    """A `StepRunner` that computes nothing. Its device runs one step after the other, each for `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._ends = 0.0

    def launch(self, plan: StepPlan) -> Letters:
        """Return the step, which has ended already unless it takes time."""
        if not self._seconds:
            return Letters(plan)
        step = Clocked(plan)
        self._ends = step.ends = max(self._ends, time.perf_counter()) + self._seconds
        return step


def engine_of(geometry: str, rows: int, length: int, device: NoDevice) -> Engine:
    """Return an engine with the KV geometry of a released model, for rows of so many tokens."""
    model = model_of(geometry)
    layout = KVLayout.of(model, 64)
    limits = Limits(length, rows, 8_192, 64)
    return Engine(model, replace(limits, num_slabs=useful_slabs(layout, limits)), layout, device)


def main() -> int:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="gemma-3-27b", choices=list(GEOMETRIES), help="of the KV")
    parser.add_argument("--rows", type=int, default=256, help="rows of a step")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of prompt and output")
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds of a step; 0: none")
    parser.add_argument("--api-server-count", type=int, default=0, help="as `jswa serve` has it")
    parser.add_argument("--stream-interval", type=int, default=1, help="as `jswa serve` has it")
    parser.add_argument("--parsed", action="store_true", help="read answers by a family's template")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    given = parser.parse_args()
    tokens = max(4_000_000, 2 * given.rows * given.length)
    config = ServeConfig(
        served_model_name=("noop",), port=given.port, max_queued_tokens=tokens, max_queued_requests=4 * given.rows,
        api_server_count=given.api_server_count, stream_interval=given.stream_interval,
    )  # fmt: skip
    set_up_logging(config)
    device, tokenizer = NoDevice(given.step_ms / 1e3), Tokenizer.load(TINY)
    assert tokenizer is not None
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {})
    answers = compile_template(shipped()["qwen_xml"], tokenizer) if given.parsed else None
    return run(
        Served(lambda: engine_of(given.geometry, given.rows, given.length, device), tokenizer, template, answers),
        config,
    )


if __name__ == "__main__":
    sys.exit(main())
