"""The engine on the Triton kernel, interpreted: `make test-triton`."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels.engine import converse, engine_on_interpreted_kernels, errors, write_model

BOUND = 2e-5  # float32: 16 roundings by 2^-24 of numbers of up to 4, in sums of some 5 terms of that size


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.nightly)])
def test_attention_on_triton_has_the_log_probabilities_of_the_dense_model(
    interpreter: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prefill by chunks, mixed steps, decode, hits and revival, with a window, sinks and a full layer."""
    write_model(tmp_path)
    with engine_on_interpreted_kernels(tmp_path, monkeypatch, dtype=dtype, kernels="attention=triton") as engine:
        found = errors(tmp_path, converse(engine)).max()
    print(f"{dtype}: at most {found:.2g}")
    assert found < (BOUND if dtype == "float32" else 2.0**-6)  # as in test_mosaic
    assert interpreter.READS["kv"], "the kernel has not run"


@pytest.mark.triton
@pytest.mark.parametrize("routing", ["xla", pytest.param("triton", marks=pytest.mark.nightly)])
def test_experts_on_triton_have_the_log_probabilities_of_the_dense_model(
    interpreter: Any, routing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts in each token, with biases and a clamped activation; tiles by plain JAX and by the routing kernel."""
    write_model(tmp_path)
    named = f"xla,experts=triton,routing={routing}"
    with engine_on_interpreted_kernels(tmp_path, monkeypatch, dtype="float32", kernels=named) as engine:
        found = errors(tmp_path, converse(engine)).max()
    print(f"routing on {routing}: at most {found:.2g}")
    assert found < BOUND
    assert interpreter.READS["weights"], "the kernel has not run"
