"""Model of the time of a step on a GPU, from bytes and FLOP, for simulations. Nothing in it was measured on a GPU.

    seconds = launch + max(weight bytes / B, FLOP of matrices / F)
                     + max(KV bytes / B, FLOP of attention / F) + sums over devices

Bytes and FLOP are exact (`benchmarks.predict.counts`): they follow from the model, its part on one device, and the plan
(weights once per step, the experts that its tokens choose, the keys and values that each row sees, padding to the
engine's buckets). Peaks are those of the data sheet. The shares of the peaks that are reached are assumed, all of them
in `Assumed`: two shares for all kernels, where `benchmarks.predict.step` has constants for each kind of kernel. The
host's time is measured (`benchmarks.speed.host_overhead` on a CPU server); the host works beside the device, and its
time counts only if it is longer.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from benchmarks.predict.counts import (
    chosen_numbers,
    expert_bytes,
    expert_numbers,
    first_visible,
    kv_numbers,
    matrices_of,
    pair_flops,
    reach_of,
    visible,
)
from jswa.architecture import ModelConfig, Reach
from jswa.config import Limits
from jswa.exec.buckets import bucket_table

Number = int | Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Device:
    """Peaks in a data sheet: bytes, bytes/s, dense 16-bit FLOP/s, bytes/s to other devices in one direction."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float


# From NVIDIA's data sheet of the H200 SXM. FP8 and 4-bit weights are widened to 16 bits before they are multiplied.
H200 = Device("H200", 141e9, 4.8e12, 989e12, 450e9)


@dataclass(frozen=True)
class Assumed:
    """The assumptions: which shares of the peaks are reached, and how long a launch and a sum over devices take.

    Attributes:
        bandwidth, flops, link: shares of the peaks of the device.
        launch: seconds per step in which the device does no useful work.
        all_reduce: seconds of a small sum over devices.
        memory: share of the device's memory for weights, KV and `scratch` bytes.
    """

    bandwidth: float = 0.7
    flops: float = 0.5
    link: float = 0.6
    launch: float = 100e-6
    all_reduce: float = 12e-6
    memory: float = 0.9
    scratch: float = 3e9


# Seconds of plan, pack and apply by rows of a decode step (benchmarks/results/cpu/host_overhead-slow.json).
HOST_SECONDS = ((1, 37e-6), (64, 173e-6), (256, 762e-6), (1400, 4490e-6))


class Work(NamedTuple):
    """The work of one step, or of each of n steps.

    Attributes:
        tokens: tokens of the bucket, padding included.
        sampled: rows whose logits are computed.
        full_keys, local_keys: keys that all rows read, in each full and each local layer.
        full_pairs, local_pairs: pairs of query and key that are multiplied, in each full and each local layer.
    """

    tokens: int
    sampled: int
    full_keys: Number
    local_keys: Number
    full_pairs: Number
    local_pairs: Number


@dataclass(frozen=True, eq=False)
class StepTime:
    """The costs of a model's steps on each of its devices.

    Attributes:
        held: bytes of all weights.
        dense: bytes of the weights that every step reads.
        experts: [tokens + 1] bytes of the experts that a step reads, by its tokens.
        token_flops, head_flops: FLOP of a token in the matrices, and of a sampled row in the head.
        full_bytes, local_bytes: bytes of a key and its value in all full and in all local layers.
        full_flops, local_flops: FLOP of a pair of query and key in all full and in all local layers.
        sums: sums over devices in a step; each moves `sum_bytes` per token and device.
        padded: [tokens + 1] tokens of the bucket of a mixed step, by its tokens.
        padded_rows: [rows + 1] tokens of the bucket of a decode step, by its rows.
        host: [rows + 1] seconds of the host, by rows of a step.
    """

    device: Device
    assumed: Assumed
    reach: Reach | None
    held: float
    dense: float
    experts: Float[np.ndarray, " T1"]
    token_flops: float
    head_flops: float
    full_bytes: int
    local_bytes: int
    full_flops: int
    local_flops: int
    sums: int
    sum_bytes: float
    padded: Int[np.ndarray, " T1"]
    padded_rows: Int[np.ndarray, " R1"]
    host: Float[np.ndarray, " R1"]

    def seconds(self, work: Work) -> Float[np.ndarray, " n"]:
        """Return the device time of each step."""
        bandwidth, flops = self.device.bandwidth * self.assumed.bandwidth, self.device.flops * self.assumed.flops
        weights = self.dense + self.experts[work.tokens]
        matrices = work.tokens * self.token_flops + work.sampled * self.head_flops
        kv = work.full_keys * self.full_bytes + work.local_keys * self.local_bytes
        pairs = work.full_pairs * self.full_flops + work.local_pairs * self.local_flops
        moved = work.tokens * self.sum_bytes / (self.device.link * self.assumed.link)
        sums = self.sums * (self.assumed.all_reduce + moved)
        total = np.maximum(weights / bandwidth, matrices / flops) + np.maximum(kv / bandwidth, pairs / flops)
        return np.asarray(total + sums + self.assumed.launch, np.float64)

    def work(self, starts: Int[np.ndarray, " R"], counts: Int[np.ndarray, " R"], sampled: int) -> Work:
        """Return the work of a step whose row i runs positions [starts[i], starts[i] + counts[i])."""
        total, rows = int(counts.sum()), len(starts)
        padded = int(self.padded_rows[rows] if total == rows else self.padded[total])
        return Work(padded, sampled, *visible(self.reach, starts, counts))

    def decode_work(self, lengths: Int[np.ndarray, " R"], steps: int) -> Work:
        """Return the work of `steps` decode steps of the same rows; the first of them runs positions `lengths`."""
        queries = lengths[:, None] + np.arange(steps)
        full = queries.sum(0) + len(lengths)
        local = (queries + 1 - first_visible(self.reach, queries)).sum(0)
        return Work(int(self.padded_rows[len(lengths)]), len(lengths), full, local, full, local)


def step_time(
    part: ModelConfig,
    limits: Limits,
    *,
    bits: float = 16,
    expert_bits: float | None = None,
    device: Device = H200,
    assumed: Assumed | None = None,
) -> StepTime:
    """Return the costs for the part of a model that is on one device.

    Args:
        bits: bits per weight; KV and embeddings have 16.
        expert_bits: bits per weight of an expert (MXFP4: 4.25 with its scales); by default `bits`.
    """
    matrices = matrices_of(part)
    always = matrices.qkv + matrices.o + matrices.mlp + matrices.router
    of_experts = bits if expert_bits is None else expert_bits
    padded, padded_rows = _buckets(limits)
    rows, seconds = zip(*HOST_SECONDS, strict=True)
    return StepTime(
        device=device,
        assumed=assumed or Assumed(),
        reach=reach_of(part),
        held=always * bits / 8
        + expert_numbers(part) * (of_experts / 8)
        + matrices.head * 2 * (1 if part.tie_embeddings else 2),
        dense=always * bits / 8 + matrices.head * 2,
        experts=expert_bytes(part, np.arange(limits.max_tokens + 1), of_experts),
        token_flops=2 * (always + chosen_numbers(part)),
        head_flops=2 * matrices.head,
        full_bytes=2 * kv_numbers(part, "full"),
        local_bytes=2 * kv_numbers(part, "local"),
        full_flops=pair_flops(part, "full"),
        local_flops=pair_flops(part, "local"),
        sums=2 * len(part.layers) + 1 if part.devices > 1 else 0,
        sum_bytes=2 * part.d_model * 2 * (part.devices - 1) / part.devices,
        padded=padded,
        padded_rows=padded_rows,
        host=np.interp(np.arange(limits.max_rows + 1), np.array(rows), np.array(seconds)),
    )


@functools.cache
def _buckets(limits: Limits) -> tuple[Int[np.ndarray, " T1"], Int[np.ndarray, " R1"]]:
    """Return the tokens of the bucket by tokens of a mixed step, and by rows of a decode step."""
    table = bucket_table(limits, on_gpu=True)
    mixed = np.array(sorted(bucket.tokens for bucket in table if not bucket.decode))
    either = np.array(sorted(bucket.tokens for bucket in table))
    tokens, rows = np.arange(limits.max_tokens + 1), np.arange(limits.max_rows + 1)
    return mixed[np.searchsorted(mixed, tokens)], either[np.searchsorted(either, rows)]
