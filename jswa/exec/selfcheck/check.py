"""Compares the kernels that an engine runs with plain XLA in float32, at start, on small content.

The shapes are those of the engine's steps, so the code that is checked is the code that will run; only the arena has
few pages, and only a few rows and experts have tokens. A compiler that gives wrong code is found before a request is.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax.numpy as jnp
import numpy as np

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import KernelError
from jswa.exec.buckets import Bucket
from jswa.exec.compile.ptxas import find_ptxas
from jswa.exec.compile.store import ProgramStore
from jswa.exec.selfcheck.attention import attention_cases
from jswa.exec.selfcheck.cases import Case, CheckedEngine
from jswa.exec.selfcheck.elementwise import elementwise_cases
from jswa.exec.selfcheck.experts import expert_cases
from jswa.exec.selfcheck.linear import linear_cases
from jswa.exec.selfcheck.routing import routing_cases
from jswa.exec.selfcheck.sampling import sampling_cases
from jswa.kernels import Kernels, kernel_of
from jswa.model.binding import run_dtype
from jswa.model.transformer import Params
from jswa.stages import stage
from pallas_kernels.interpreter import interpreting

_log = logging.getLogger("jswa")
_THREADS = 8  # compile at once
_SLOW = "they are compared with XLA on this device, once for this version of jswa"
# Kernels round probabilities and results to their type, half an eps each time; wrong code is off by whole values.
_ROUNDINGS = 4
_DIFFERENT = 1 / 8  # of the tokens: a sum that is rounded otherwise may draw another one


# The checks of each operation's kernels; XLA's and the library's are not checked.
CHECKS: Mapping[str, Callable[[CheckedEngine], Iterator[Case]]] = {
    "attention": attention_cases,
    "experts": expert_cases,
    "linear": linear_cases,
    "elementwise": elementwise_cases,
    "routing": routing_cases,
    "sampling": sampling_cases,
}


def check_kernels(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    limits: Limits,
    buckets: Sequence[Bucket],
    kernels: Kernels,
    kv_dtype: np.dtype,
    store: ProgramStore | None = None,
) -> int:
    """Compare the kernels with XLA's on one device of this host; return how many.

    Not again if the store knows that they agreed: of the same sources, compilers and device, in the same shapes.

    Attention is checked in the smallest, the middle and the largest decode bucket, in the largest for each number of
    drafts, and in the smallest and the largest other one, for each kind of layer; experts, and linear
    layers in tiles, in every tuning that the buckets lead to; products of 8-bit factors for each size of a matrix, with
    few tokens and with many. XLA's own and the experts of a CPU, which are no compiler's work, are not checked.

    Args:
        model, layout: of one device's part.

    Raises KernelError that names the first kernel whose numbers differ by more than rounding.
    """
    local = {name: value.addressable_shards[0].data for name, value in params.items()}
    engine = CheckedEngine(
        model, local, layout, limits, buckets, _chosen(buckets), kernels, run_dtype(params), kv_dtype
    )
    if store is None:
        return _compare(engine)
    fixed = dataclasses.replace(limits, num_slabs=0)  # as the memory that is free is never the same
    key = f"kernels {model} {layout} {fixed} {buckets} {kernels} {kv_dtype}"
    return store.figure(key, (params,), "", partial(_compare, engine))


def _compare(engine: CheckedEngine) -> int:
    checked = [operation for operation, name in engine.kernels.table().items() if kernel_of(operation, name).checked]
    cases = [case for operation in checked for case in CHECKS[operation](engine)]
    if not cases:
        return 0
    # Threads, since nearly all of the time is compilation; the interpreter is a setting of this thread.
    size = f"{len(cases)} agree with XLA"
    with ThreadPoolExecutor(_THREADS) as pool, stage("kernels", len(cases), size, slow=_SLOW) as done:
        results = map(_difference, cases) if interpreting() else pool.map(_difference, cases)
        for case, (difference, bound) in zip(cases, results, strict=True):
            _log.debug("%s: differs from XLA by %.3g, at most %.3g is rounding", case.kernel, difference, bound)
            if not difference <= bound:  # NaN too
                raise KernelError(case.kernel, difference, bound, str(find_ptxas() or "ptxas was not found"))
            done(1)
    return len(cases)


def _difference(case: Case) -> tuple[float, float]:
    """Return the largest difference where XLA's result is finite, and the largest that rounding can make.

    Of integers, such as tokens: the share that differs.
    """
    results = case.run()
    if jnp.issubdtype(results[1].dtype, jnp.integer):
        found, expected = map(np.asarray, results)
        return float((found != expected).mean()), _DIFFERENT
    found, expected = (np.asarray(array, np.float32) for array in results)
    eps = 2.0**-7  # of bfloat16, the coarsest type that kernels run in
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0, 0.0
    most = float(np.abs(expected[finite]).max())
    with np.errstate(invalid="ignore"):
        return float(np.abs(found - expected)[finite].max()), _ROUNDINGS * eps * most


def _chosen(buckets: Sequence[Bucket]) -> list[Bucket]:
    plain = [bucket for bucket in buckets if not bucket.drafts]
    decode, mixed = ([b for b in plain or buckets if b.decode is kind] for kind in (True, False))
    picked = [*decode[:1], *decode[len(decode) // 2 :][:1], *decode[-1:], *mixed[:1], *mixed[-1:]]
    picked += {bucket.drafts: bucket for bucket in buckets if bucket.drafts}.values()
    return list(dict.fromkeys(picked))
