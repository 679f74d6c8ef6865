"""A program with eight CPU devices: a model's texts with and without drafts.

    python -m tests.support.drafts.forms FOLDER NAME DEVICES METHOD

Names are those of `tests.support.shared_model`, whose requests are run by two deterministic engines, one of which
drafts. Prints the results of both as JSON, and how many drafts there were and were right.
"""

import json
import sys
from pathlib import Path

import jax

from tests.support.commands.leaving import leave
from tests.support.oracles import quick_compiles
from tests.support.shared_model import DRAFTS, ask, checkpoint, load


def main(folder: Path, name: str, devices: int, method: str) -> None:
    """Run both engines."""
    model, vocab = checkpoint(name, folder)
    with quick_compiles(), load(model, devices) as plain:
        found = [ask(plain, vocab)]
    with quick_compiles(), load(model, devices, speculative_config={**DRAFTS, "method": method}) as drafting:
        found.append(ask(drafting, vocab))
        drafts = drafting.engine.step_stats().drafts
        assert drafts is not None
    print(json.dumps({"facts": found, "drafts": drafts.sums}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # type: ignore[no-untyped-call]
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
    leave()
