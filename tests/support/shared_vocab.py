"""A program with eight CPU devices: samples from a vocabulary of which each device has a share.

    python -m tests.support.shared_vocab VOCAB DEVICES…

It prints JSON, for each number of devices: tokens and log probabilities of rows with all kinds of limits. Run by
test_large_vocab.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jswa.exec.mesh import COLUMNS, REPLICATED, make_mesh, on_mesh
from jswa.exec.programs.logits_state import LogitsState, init_logits_state
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.xla import sample
from jswa.ribs.logprobs.traced import LogprobRows, logprob_rows
from tests.support.builders import sampling_columns
from tests.support.commands.leaving import leave

ROWS = 6


def run(
    logits: Array, positions: Array, columns: Array, logits_state: LogitsState, *, devices: int
) -> tuple[Array, LogprobRows]:
    """Sample, and return log probabilities, with this device's share of the logits."""
    tokens = sample(logits, positions, Sampling.of(columns), logits_state, devices)
    return tokens, logprob_rows(logits, tokens, devices)


def main(vocab: int, devices: int) -> dict[str, Any]:
    """Return what so many devices sample."""
    logits = (2 * np.random.default_rng(0).standard_normal((ROWS, vocab))).astype(np.float32)
    logits[5, [vocab // 8 - 1, vocab // 8]] = 20.0  # ties at the edge of a share: the first token is chosen
    columns = sampling_columns(
        ROWS,
        temperature=[1.0, 1.0, 0.7, 1.5, 1.0, 0.0],
        top_k=[0, 50, 0, 40_000, 0, 0],
        top_p=[1.0, 1.0, 0.9, 0.95, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.02, 0.0],
        key_low=np.arange(ROWS),
    )
    mesh = make_mesh(devices)
    share = jnp.asarray(logits) if mesh is None else jax.device_put(logits, NamedSharding(mesh, COLUMNS))
    arguments = share, np.full(ROWS, 131_071, np.int32), columns, init_logits_state(1, vocab)
    step = on_mesh(partial(run, devices=devices), mesh, arguments, REPLICATED)
    tokens, rows = jax.tree.map(np.asarray, jax.jit(step)(*arguments))
    return {
        "tokens": tokens.tolist(),
        "ids": rows.ids.tolist(),
        "rank": rows.rank.tolist(),
        "logprobs": [rows.chosen.tolist(), *rows.values.T.tolist()],
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # type: ignore[no-untyped-call]
    size, *counts = map(int, sys.argv[1:])
    print(json.dumps([main(size, devices) for devices in counts]))
    leave()
