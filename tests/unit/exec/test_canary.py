"""Kernels are checked at start, and a wrong one is refused by name (jswa/exec/canary.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import JswaError, KernelError
from jswa.exec.backends import Backends
from jswa.exec.buckets import Bucket
from jswa.exec.canary import check_kernels
from jswa.model.weights.load import dummy_checkpoint
from pallas_kernels.attention import reference
from pallas_kernels.experts.hopper import call as hopper
from pallas_kernels.interpreter import interpreted
from tests.support.checkpoints.quantized import plain_tensors, write
from tests.support.oracles import quick_compiles, random_params, small_model


def checked(backends: Backends, buckets: Sequence[Bucket]) -> int:
    """Check the kernels of a small hybrid model; return how many."""
    model = small_model("LF", window=64)
    limits = Limits(max_model_len=256, max_rows=2, max_tokens=8, page_size=16, num_blocks=4)
    layout = KVLayout.of(model, limits.page_size)
    with quick_compiles():
        return check_kernels(model, random_params(model), layout, limits, buckets, backends, np.dtype(np.float32))


DECODE, MIXED = Bucket(2, 2, decode=True), Bucket(8, 2, decode=False)


def test_right_kernels_pass() -> None:
    """Full and local layers, in a decode bucket and with prefill; XLA's own kernel is not compared with itself."""
    assert checked(Backends("reference"), [DECODE, MIXED]) == 4
    assert checked(Backends(), [DECODE, MIXED]) == 0


@pytest.mark.parametrize("fault", ["scale", "nan"])
def test_a_kernel_that_is_broken_on_purpose_is_refused_by_name(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results a tenth too large, and NaN in one head."""
    right = reference.paged_attention

    def wrong(q: jax.Array, kv: jax.Array, rows: Any, tiles: Any, **rest: Any) -> jax.Array:
        out = right(q, kv, rows, tiles, **rest)
        return out * 1.1 if fault == "scale" else out.at[:, 0].set(jnp.nan)

    monkeypatch.setattr(reference, "paged_attention", wrong)
    jax.clear_caches()  # type: ignore[no-untyped-call]  # the right kernel may have been traced
    with pytest.raises(KernelError, match=r"attention kernel 'reference', .* heads of .*ptxas") as refused:
        checked(Backends("reference"), [DECODE])
    assert isinstance(refused.value, JswaError)
    assert "attention kernel" in refused.value.kernel
    assert not refused.value.difference <= refused.value.bound


@pytest.mark.parametrize("broken", [False, True])
def test_expert_kernels_are_checked_on_the_weights_as_they_are_held(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 tiles by the Hopper kernel, interpreted: gates and ups, and downs. A wrong one is refused by name."""
    config, _ = plain_tensors("gpt_oss_base", intermediate_size=64)
    write(tmp_path, {**config, "num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}, {})
    bfloat16 = jnp.dtype("bfloat16")
    model, params = dummy_checkpoint(tmp_path, bfloat16, 0, quantization="mxfp4", experts="mosaic")
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_blocks=4)
    if broken:
        right = hopper.grouped_matmul
        monkeypatch.setattr(hopper, "grouped_matmul", lambda *given, **rest: right(*given, **rest) * 1.1)
        jax.clear_caches()  # type: ignore[no-untyped-call]  # the right kernel may have been traced
    with interpreted(), quick_compiles():
        arguments = model, params, KVLayout.of(model, 16), limits, [DECODE], Backends("xla", "mosaic")
        if broken:
            with pytest.raises(KernelError, match=r"expert kernel 'mosaic', layers\.0\.mlp\.gate_up, 2 tokens"):
                check_kernels(*arguments, np.dtype(bfloat16))
        else:
            assert check_kernels(*arguments, np.dtype(bfloat16)) == 2
