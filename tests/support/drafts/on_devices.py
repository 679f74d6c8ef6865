"""Drafters on one device and on two, in a process with two devices: `python -m tests.support.drafts.on_devices KIND`.

Prints the tokens of two texts and all drafts, a line of JSON for each number of devices.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JSWA_COMPILATION_CACHE"] = ""  # programs that report drafts cannot be kept

import jax

from jswa.exec.runner import Runner
from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.support.drafts.dflash import write_dflash
from tests.support.drafts.engines import DRAFTS, Seen, watched

WIDTH, VOCAB = 128, 1024  # of `tiny`


def facts(kind: str, folder: Path, devices: int) -> dict[str, Any]:
    """Return the tokens of a greedy and of a sampled text, and what was drafted for them."""
    drafter, seen = {"method": kind.split("_")[0], "model": str(folder), "num_speculative_tokens": DRAFTS}, Seen()
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256, "tensor_parallel_size": devices}
    params = [SamplingParams(max_tokens=24, temperature=value, seed=1, ignore_eos=True) for value in (0, 0.8)]
    with watched(seen), LLM("tiny", speculative_config=drafter, **options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Runner)
        while DRAFTS not in runner.lengths(2, tokens=0, split=False, variant="none"):
            time.sleep(0.1)
        llm.engine.scheduler.drafting.choice.choose = lambda *_: DRAFTS  # type: ignore[method-assign]
        found = llm.generate(["Once upon a time", "The red ball"], params, use_tqdm=False)
        jax.effects_barrier()  # type: ignore[no-untyped-call]
    return {"texts": [one.outputs[0].token_ids for one in found], "drafts": sorted(set(seen.drafts))}


if __name__ == "__main__":
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as where:
        written = write_dflash(name, Path(where), WIDTH, VOCAB)
        for count in (1, 2):
            print(json.dumps(facts(name, written, count)))
