"""The server on an engine whose device answers at once: the host's work is real, of a real model's KV geometry.

    python -m benchmarks.speed.noop_server [--geometry gemma-3-27b] [--rows 256] [--length 32768] [--port 0]

Prompts are token ids of the tiny model's tokenizer, texts are its letters.
"""

import argparse
import sys

import numpy as np
from jaxtyping import Int

from benchmarks.speed.multiturn import AnsweredStep
from jswa.cache.capacity import useful_blocks
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.llm import TINY
from jswa.plan import StepPlan
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from server.http.process import run, set_up_logging
from server.options import ServeConfig
from tools.cases.geometry import GEOMETRIES, model_of


class Letters(AnsweredStep):
    """A step whose tokens are letters."""

    def tokens(self) -> Int[np.ndarray, " R"]:
        """The same for the same slot and position."""
        letters: Int[np.ndarray, " R"] = (self.plan.starts + self.plan.counts + self.plan.row_ids) % 26 + 100
        return letters


class NoDevice:
    """`StepRunner` for the host part alone."""

    def launch(self, plan: StepPlan) -> Letters:
        """Done."""
        return Letters(plan)


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--geometry", default="gemma-3-27b", choices=list(GEOMETRIES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    model = model_of(given.geometry)
    layout = KVLayout.of(model, 64)
    limits = Limits(given.length, given.rows, 8_192, 64)
    limits = Limits(given.length, given.rows, 8_192, 64, num_blocks=useful_blocks(layout, limits))
    config = ServeConfig(served_model_name=("noop",), port=given.port, max_queued_tokens=2 * given.rows * given.length)
    set_up_logging(config)
    return run(Served(lambda: Engine(model, limits, layout, NoDevice()), Tokenizer.load(TINY)), config)


if __name__ == "__main__":
    sys.exit(main())
