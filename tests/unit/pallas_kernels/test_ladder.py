"""The ladder of `tools.cases.kernels.ladder`: on a GPU each rung in a process of its own, elsewhere interpreted.

The kernels of cases run in other tests, too. There few of them are interpreted; here all, nightly and on a GPU.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from jaxtyping import Array

from jswa.llm import LLM
from pallas_kernels import mosaic
from pallas_kernels.attention.api import Implementation
from pallas_kernels.mosaic import Ref, plgpu
from tests.support.kernels import calls, grouped_calls
from tests.support.kernels.device import hopper
from tools.cases.kernels.attention import CASES, Case
from tools.cases.kernels.attention_fp8 import FP8_CASES
from tools.cases.kernels.attention_lookback import LOOKBACK_CASES
from tools.cases.kernels.experts import CASES as EXPERT_CASES
from tools.cases.kernels.ladder import RUNGS, Rung
from tools.cases.small_models import SMALL_MODELS

ATTENTION = {case.name: case for case in (*CASES, *FP8_CASES, *LOOKBACK_CASES)}
EXPERTS = {case.name: case for case in EXPERT_CASES}
SHAPE = (64, 64)
HALF = jnp.dtype(jnp.bfloat16)
WIDE = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class Simple:
    """A kernel of one warpgroup with an output of SHAPE, its operands, and the result."""

    body: Callable[..., None]
    out: jnp.dtype
    scratch: dict[str, Any]
    operands: tuple[Array, ...]
    wanted: np.ndarray

    @property
    def program(self) -> Any:
        """The kernel as a program."""
        outputs = [(SHAPE, self.out)]
        return jax.jit(
            mosaic.kernel(self.body, name="rung", outputs=outputs, grid={"x": 1}, num_threads=1, scratch=self.scratch)
        )


def numbers(seed: int) -> Array:
    """Return random numbers of SHAPE in 16 bits."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(SHAPE), HALF)


def copy_through_registers() -> Simple:
    """Global memory to registers and back."""

    def body(x: Ref, out: Ref) -> None:
        out[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)

    x = numbers(0)
    return Simple(body, HALF, {}, (x,), np.asarray(x.astype(WIDE)))


def copy_by_tma() -> Simple:
    """Global memory to tiled shared memory, and to global memory."""

    def body(x: Ref, out: Ref, *, tile: Ref, ready: Ref) -> None:
        plgpu.copy_gmem_to_smem(x, tile, ready)
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)

    x = numbers(1)
    scratch = {"tile": mosaic.tiled(SHAPE, HALF, 128), "ready": plgpu.Barrier()}
    return Simple(body, HALF, scratch, (x,), np.asarray(x.astype(WIDE)))


def product(*, in_registers: bool) -> Simple:
    """A product of two tiles that TMA has brought; the left one from shared memory, or from registers and added."""

    def body(a: Ref, b: Ref, out: Ref, *, tiles: tuple[Ref, Ref], staged: Ref, ready: Ref) -> None:
        for source, tile in zip((a, b), tiles, strict=True):
            plgpu.copy_gmem_to_smem(source, tile, ready)
        plgpu.barrier_wait(ready)
        if in_registers:
            one = mosaic.full(SHAPE, 1.0)
            total = mosaic.accumulate(one, mosaic.load(tiles[0]), tiles[1])
        else:
            total, _ = mosaic.product_and(*tiles, lambda: None)
        staged[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out)
        plgpu.wait_smem_to_gmem(0)

    a, b = numbers(2), numbers(3)
    scratch = {
        "tiles": (mosaic.tiled(SHAPE, HALF, 128), mosaic.tiled(SHAPE, HALF, 128)),
        "staged": plgpu.SMEM(SHAPE, WIDE),
        "ready": plgpu.Barrier(num_arrivals=2),
    }
    left, right = (np.asarray(x.astype(WIDE)) for x in (a, b))
    return Simple(body, WIDE, scratch, (a, b), 1 + left @ right if in_registers else left @ right.T)


def attend(case: Case, implementation: Implementation) -> None:
    """A case of attention."""
    for rows in case.rows:
        call = calls.make_call(case, rows)
        calls.check(calls.run(call, case, implementation), call, case)


def multiply(name: str) -> None:
    """A case of experts."""
    case = EXPERTS[name]
    call = grouped_calls.make_call(case)
    grouped_calls.check(grouped_calls.run(call, case, "mosaic"), call, case)


def whole_model(folder: Path) -> None:
    """A small gpt-oss: log probabilities of a prompt by the device's kernels and by plain XLA. One step each."""
    (folder / "config.json").write_text(json.dumps(SMALL_MODELS["gpt-oss"]))
    tokens = np.random.default_rng(4).integers(3, 4096, 300).tolist()
    found = []
    for backend in ("auto", "xla" if jax.default_backend() == "gpu" else "reference"):
        options: dict[str, Any] = {"kernels": backend}
        limits = {"max_num_seqs": 1, "max_num_batched_tokens": 320, "max_model_len": 320}
        with LLM(folder, load_format="dummy", kv_cache_memory_bytes=2**24, **limits, **options) as llm:
            (out,) = llm.generate([tokens], max_tokens=1, temperature=0, prompt_logprobs=0, use_tqdm=False)
        entries: Any = out.prompt_logprobs
        found.append([next(iter(entry.values())).logprob for entry in entries[1:]])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=0.15 if jax.default_backend() == "gpu" else 1e-3)


SIMPLE: dict[str, Callable[[], Simple]] = {
    "a copy through registers": copy_through_registers,
    "a copy by TMA": copy_by_tma,
    "a WGMMA of shared memory": partial(product, in_registers=False),
    "a WGMMA with an operand in registers": partial(product, in_registers=True),
}


def rungs() -> list[ParameterSet]:
    """Return the rungs. Those of a second or less run everywhere."""
    return [
        pytest.param(rung, id=rung.name, marks=() if rung.name in SIMPLE else pytest.mark.nightly) for rung in RUNGS
    ]


@pytest.mark.parametrize("rung", rungs())
def test_rung(rung: Rung, tmp_path: Path) -> None:
    """Each is right on this device."""
    if rung.name in SIMPLE:
        simple = SIMPLE[rung.name]()
        with hopper():
            out = np.asarray(simple.program(*simple.operands)[0].astype(jnp.float32))
        np.testing.assert_allclose(out, simple.wanted, rtol=1e-4, atol=1e-4)
    elif rung.name == "a whole model":
        whole_model(tmp_path)
    elif rung.kernels == ("triton",):
        pytest.importorskip("jax_triton")
        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU")
        attend(ATTENTION[rung.case], "triton")
    elif rung.case in ATTENTION:
        attend(ATTENTION[rung.case], "mosaic")
    else:
        multiply(rung.case)


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_kernels_lower_for_hopper(name: str) -> None:
    """Interpretation checks no register layouts. If these did not compile, all kernels would seem to be broken."""
    simple = SIMPLE[name]()
    lowered = simple.program.trace(*simple.operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
