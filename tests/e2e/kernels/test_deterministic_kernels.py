"""`deterministic=True` on the Hopper kernels, interpreted: the same bits in every batch shape.

Attention whose keys are not split, linear layers, routers and head in 16 bits, experts, norms, rotation and KV writes
are on Mosaic. What is added along rows besides is the CPU library's here, and Triton's on a GPU.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Array

from jswa.engine import Engine
from jswa.types import SamplingParams
from pallas_kernels.cpu import library
from pallas_kernels.experts import dense
from tests.support.kernels.device import add_in_order
from tests.support.kernels.engine import engine_on_interpreted_kernels, write_model

KERNELS = "attention=mosaic_whole,experts=mosaic,linear=mosaic,elementwise=mosaic,sampling=cpu"
OPTIONS: dict[str, Any] = {
    "kernels": KERNELS,
    "dtype": "bfloat16",
    "deterministic": True,
    "cudagraph_capture_sizes": (),
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}
Bits = dict[str, list[tuple[Any, ...]]]  # of each request: tokens, and all that is said of their probabilities


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt and its parameters."""

    prompt: list[int]
    params: SamplingParams


def questions() -> dict[str, Asked]:
    """Return requests of several lengths, greedy and sampled."""
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "seed": 2},
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 4},
    ]
    return {
        str(index): Asked(
            rng.integers(3, 96, length).tolist(), SamplingParams(**kind, max_tokens=2, ignore_eos=True, logprobs=2)
        )
        for index, (length, kind) in enumerate(zip((19, 5, 3), kinds, strict=True))
    }


def run(engine: Engine, asked: dict[str, Asked], disturb: Callable[[Engine], None] = lambda _: None) -> Bits:
    """Run requests side by side; `disturb` is called before each step."""
    for name, one in asked.items():
        engine.add(engine.request(name, np.array(one.prompt, np.int32), one.params))
    found: Bits = {name: [] for name in asked}
    while engine.has_work():
        disturb(engine)
        for event in engine.step():
            assert event.token is not None
            found[event.request_id].append((event.token, event.logprobs))
    engine.check()
    return found


def preempt_once(engine: Engine) -> None:
    """Preempt the first request when it has generated a token."""
    running = engine.scheduler.running
    if len(running) > 1 and not engine.stats().preemptions:
        engine.scheduler.preempt(running[0].request.request_id)


def found_in(folder: Path, patch: pytest.MonkeyPatch, check: Callable[[Callable[..., Engine]], None]) -> None:
    """Write the model, and call `check` with a function that makes idle engines with changed limits."""
    add_in_order(patch)
    write_model(folder, "gpt_oss wide", "bfloat16")
    with engine_on_interpreted_kernels(folder, patch, **OPTIONS) as own:
        assert not own.limits.one_bucket

        def make(**changes: Any) -> Engine:
            return Engine(own.model, dataclasses.replace(own.limits, **changes), own.layout, own.runner, seed=0)

        check(make)


@pytest.mark.nightly
@pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not built")
def test_bits_do_not_depend_on_what_else_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or in a batch, in chunks of any size, behind cached prefixes or cold, preempted or not."""
    asked = questions()

    def check(make: Callable[..., Engine]) -> None:
        alone = {key: run(make(prefix_cache=False), {key: one})[key] for key, one in asked.items()}
        cached = make()
        assert run(cached, asked) == alone
        assert run(cached, {"0": asked["0"]}) == {"0": alone["0"]}
        assert cached.cache_stats().cached_tokens
        assert run(make(max_tokens=7, long_prefill=5, prefix_cache=False), asked) == alone
        engine = make(prefix_cache=False)
        assert run(engine, asked, preempt_once) == alone
        assert engine.stats().preemptions

    found_in(tmp_path, monkeypatch, check)


@pytest.mark.nightly
@pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not built")
def test_a_product_that_depends_on_the_number_of_tokens_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose results are off by half a unit of bfloat16 for each token."""
    right = dense.matmul

    def wrong(x: Array, *given: Any, **named: Any) -> Array:
        return right(x, *given, **named) * (1 + len(x) * 2.0**-9)

    monkeypatch.setattr(dense, "matmul", wrong)
    asked = questions()

    def check(make: Callable[..., Engine]) -> None:
        alone = run(make(prefix_cache=False), {"1": asked["1"]})["1"]
        assert run(make(prefix_cache=False), asked)["1"] != alone

    found_in(tmp_path, monkeypatch, check)
