"""The engine on the Triton kernel, interpreted: `make test-triton`."""

import sys
from pathlib import Path

import pytest

from tests.support.kernels.engine import converse, engine_on_interpreted_kernels, errors, write_model

BOUND = 2e-5  # float32: 16 roundings by 2^-24 of numbers of up to 4, in sums of some 5 terms of that size


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.nightly)])
def test_attention_on_triton_has_the_log_probabilities_of_the_dense_model(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prefill by chunks, mixed steps, decode, hits and revival, with a window, sinks and a full layer."""
    from tests.support.kernels import triton_interpreter

    monkeypatch.setitem(sys.modules, "jax_triton", triton_interpreter)
    triton_interpreter.READS.clear()
    write_model(tmp_path)
    with engine_on_interpreted_kernels(tmp_path, monkeypatch, dtype=dtype, attention_backend="triton") as engine:
        found = errors(tmp_path, converse(engine)).max()
    print(f"{dtype}: at most {found:.2g}")
    assert found < (BOUND if dtype == "float32" else 2.0**-6)  # as in test_mosaic
    assert triton_interpreter.READS["kv"], "the kernel has not run"
