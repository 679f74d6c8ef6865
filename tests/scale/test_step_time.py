"""The step-time model: bytes and FLOP against brute force, weights against `jswa capacity`."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale.simulate import SERVED, fleet_of
from benchmarks.scale.step_time import Assumed, StepTime, Work
from jswa.architecture import Reach
from jswa.exec.sizing import weight_bytes
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import Quantization
from jswa.model.partition import shard_config
from tools.cases.hub_configs import CONFIGS


def model(reach: Reach | None) -> StepTime:
    """Return the costs of a model with another reach."""
    return replace(fleet_of("gemma-3-27b", longest=8192).time, reach=reach)


def counted(reach: Reach | None, starts: list[int], counts: list[int]) -> tuple[int, int, int, int]:
    """Count keys read and pairs multiplied in layers of both kinds, one by one."""
    full_keys = local_keys = full_pairs = local_pairs = 0
    for start, count in zip(starts, counts, strict=True):
        seen = [range(reach.first_visible(q) if reach else 0, q + 1) for q in range(start, start + count)]
        full_keys += start + count
        local_keys += len(set().union(*seen))
        full_pairs += sum(q + 1 for q in range(start, start + count))
        local_pairs += sum(map(len, seen)) if reach else 0
    return full_keys, local_keys, full_pairs, local_pairs


@pytest.mark.parametrize("reach", [Reach(5), Reach(8, chunked=True), None])
def test_work_equals_a_count_one_by_one(reach: Reach | None) -> None:
    """Prefill and decode rows, at and around the edges of windows and chunks."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        starts, counts = rng.integers(0, 30, 4), rng.integers(1, 20, 4)
        work = model(reach).work(starts, counts, 4)
        assert work[2:] == counted(reach, starts.tolist(), counts.tolist())
        assert work.tokens >= counts.sum()


@pytest.mark.parametrize("reach", [Reach(5), Reach(8, chunked=True), None])
def test_the_work_of_many_decode_steps_is_that_of_each(reach: Reach | None) -> None:
    """Work and seconds are bitwise equal."""
    time, lengths = model(reach), np.array([0, 3, 4, 7, 8, 21])
    ahead = time.decode_work(lengths, 12)
    seconds = time.seconds(ahead)
    for step in range(12):
        work = time.work(lengths + step, np.ones(6, np.int64), 6)
        assert work.full_keys == ahead.full_keys[step]  # type: ignore[index]
        if reach is not None:
            assert work.local_keys == ahead.local_keys[step]  # type: ignore[index]
        assert float(time.seconds(work)) == seconds[step]


@pytest.mark.parametrize("name", SERVED)
def test_weights_equal_those_of_jswa_capacity(name: str) -> None:
    """Within 1 %: the model leaves out norms, biases and block scales. 8-bit weights count one byte."""
    served = SERVED[name]
    part = shard_config(parse_config(CONFIGS[served.config], weights=False), served.devices)
    stored = None if served.expert_bits is None else Quantization("mxfp4")
    true = weight_bytes(part, stored, "int8" if served.bits == 8 else "auto", "bfloat16")
    assert fleet_of(name, longest=8192).time.held == pytest.approx(true, rel=0.01)


def test_seconds_follow_the_assumed_shares() -> None:
    """With half the bandwidth, work bound by it takes twice as long, and work bound by FLOP as long as before."""
    full, half = Assumed(launch=0.0), Assumed(launch=0.0, bandwidth=0.35)
    quick, slow = (fleet_of("gemma-3-27b", longest=8192, assumed=each).time for each in (full, half))
    decode = quick.work(np.array([100]), np.array([1]), 1)
    prefill = quick.work(np.array([0]), np.array([2048]), 1)
    assert slow.seconds(decode) == pytest.approx(2 * quick.seconds(decode))
    assert slow.seconds(prefill) == pytest.approx(quick.seconds(prefill), rel=1e-3)
    assert quick.seconds(decode) > quick.held / (quick.device.bandwidth * full.bandwidth)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """One token reads the experts that it chose; many tokens read all of them, and never more."""
    time = fleet_of("gpt-oss-120b", longest=8192).time
    all_experts = time.held - (time.dense + 201088 * 2880)  # without the embedding: 16 bits, half of it on each device
    assert time.experts[0] == 0
    assert time.experts[1] == pytest.approx(all_experts * 4 / 128, rel=0.01)
    assert np.all(np.diff(time.experts) >= 0)
    assert time.experts[-1] == pytest.approx(all_experts, rel=0.01)
    assert np.all(np.asarray(time.seconds(Work(1, 1, 1, 1, 1, 1))) > 0)
