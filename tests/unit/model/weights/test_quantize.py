"""Quantization while reading: results equal those for the whole matrix, and only a few rows are in memory."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Shaped

from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import Fold, Source, TensorPart
from jswa.model.weights.quantize import float8, load_quantized
from pallas_kernels.quantized import Kind, quantize, quantize_rows

FIRST, LAST = Fold(8, 4, True), Fold(8, 4, False)
CASES = {
    "matrix": (Source((TensorPart("a", (24, 20)), TensorPart("b", (16, 20))), "matrix"), (20, 40)),
    "folded": (Source((TensorPart("a", (24, 20)), TensorPart("b", (16, 20))), "matrix", folds=(FIRST, LAST)), (20, 40)),
    "columns": (Source((TensorPart("a", (20, 24)),), "columns", folds=(LAST,)), (24, 20)),
    "rank_slices": (Source((TensorPart("a", (48, 20)),), "rank_slices", rows=(32, 8, 8)), (20, 48)),
    "experts": (Source(tuple(TensorPart(key, (9, 20)) for key in "abcd"), "experts", per_expert=2), (2, 20, 18)),
    "transposed": (Source((TensorPart("a", (3, 9, 20)), TensorPart("b", (3, 9, 20))), "transposed"), (3, 20, 18)),
    "transposed_interleaved": (Source((TensorPart("a", (3, 18, 20)),), "transposed_interleaved"), (3, 20, 18)),
    "rows": (Source((TensorPart("a", (3, 20, 18)),)), (3, 20, 18)),
    "embedding": (Source((TensorPart("a", (40, 20)),)), (40, 20)),
    "interleaved": (Source((TensorPart("a", (3, 20, 18)),), "interleaved"), (3, 20, 18)),
}
_quantize, _quantize_rows = (jax.jit(function, static_argnames="kind") for function in (quantize, quantize_rows))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_results_equal_quantization_of_the_whole_matrix(name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are equal for every layout and every chunk of rows; an output of zeros has scale 1."""
    monkeypatch.setattr("jswa.model.weights.quantize.CHUNK", 70)  # three rows
    source, shape = CASES[name]
    rng, dtype = np.random.default_rng(0), np.dtype("float32" if name == "rows" else jnp.bfloat16)
    stored = {part.key: rng.standard_normal(part.shape).astype(np.float32) for part in source.parts}
    stored["a"][..., 5, :] = 0
    stored["a"][..., 7] = 0

    def read(part: TensorPart, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
        return stored[part.key].reshape(-1, part.shape[-1])[begin:end]

    whole = np.empty(shape, dtype)
    assemble(source, whole, read)
    rounded = _quantize_rows if name == "embedding" else _quantize
    wanted = rounded(jnp.asarray(whole), kind=kind)
    values, scales = load_quantized(kind, source, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), read)  # type: ignore[no-untyped-call]
    assert (np.asarray(wanted.scales) == 1).any()
    np.testing.assert_array_equal(values, wanted.values)
    np.testing.assert_array_equal(scales, wanted.scales)


def test_float8_rounds_to_nearest_with_ties_to_even() -> None:
    """ml_dtypes agrees on every float8 number, the midpoints, the neighbors of both, and zeros."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    around = [np.nextafter(found, np.float32(way)) for way in (-1e9, 1e9)]
    x = np.concatenate([found, *around, np.random.default_rng(0).uniform(-448, 448, 10_000).astype(np.float32)])
    x = np.concatenate([x, -x])[None]
    np.testing.assert_array_equal(float8(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("name", ["matrix", "rows"])
def test_memory_holds_only_a_few_chunks_beside_the_result(name: str) -> None:
    """At most 24 MiB are allocated; the matrix has 32 MiB in bfloat16 and 64 in float32."""
    source = Source((TensorPart("a", (1, 4096, 4096) if name == "rows" else (4096, 4096)),), name)  # type: ignore[arg-type]
    row = np.random.default_rng(0).standard_normal(4096).astype(jnp.bfloat16)
    shape = jax.ShapeDtypeStruct(source.parts[0].shape, jnp.bfloat16)  # type: ignore[no-untyped-call]
    tracemalloc.start()
    try:
        values, _ = load_quantized("int8", source, shape, lambda part, begin, end: np.tile(row, (end - begin, 1)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes + 24 * 2**20
