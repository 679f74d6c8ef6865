"""Linear layers in packed integers of 4 bits and in 16 bits, on XLA and on Mosaic: microseconds of a product.

    python -m benchmarks.gpu.kernels.dense [--json FILE] [--only NAME] [--tokens 64 256] [--smoke]

The matrices are those of released models, with gates, ups and activation in one. `share` is that of a large copy in the
same run, of the bytes of the weights as they are held, each read once. `difference` is the largest one between both
products in 4 bits, over the largest result. Needs a Hopper GPU, except for --smoke, which runs XLA alone.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks import result_file
from benchmarks.gpu.kernels.attention import CACHE_BYTES, ceilings
from benchmarks.gpu.kernels.device_time import calls_worth_timing, time_calls
from pallas_kernels import int4
from pallas_kernels.experts import dense, int4_tiles
from pallas_kernels.experts.dense import Dense, DensePlain, DenseTiles
from pallas_kernels.experts.glu import glu
from pallas_kernels.int4 import Int4
from tools.cases.kernels.dense import MATRICES, TOKENS, Matrix

Form = Literal["16 bits on XLA", "16 bits on Mosaic", "4 bits on XLA", "4 bits on Mosaic"]
SMOKE = Matrix("smoke", "down", 128, 64)
_GROUP = 128  # inputs that share a scale
_BFLOAT16 = jnp.dtype("bfloat16")


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only matrices whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*TOKENS, 2048], help="tokens of a step")
    parser.add_argument("--smoke", action="store_true", help="a small matrix on any machine; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    matrices = [SMOKE] if args.smoke else [matrix for matrix in MATRICES if args.only in matrix.name]
    forms = [form for form in get_args(Form) if not (args.smoke and form.endswith("Mosaic"))]
    roof = ceilings(_BFLOAT16, size=256 if args.smoke else 8_192)
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "ceilings": roof, "linear": []}
    for matrix in matrices:
        for tokens in args.tokens:
            row = {"matrix": matrix.name, "tokens": tokens, **compared(matrix, tokens, forms, roof["copy_bytes_per_s"])}
            results["linear"].append(row)
            print(row, flush=True)
            if args.json:  # after each measure, because a run may be cut off
                result_file.write(args.json, results)


def compared(matrix: Matrix, tokens: int, forms: list[Form], roof: float) -> dict[str, Any]:
    """Return microseconds and share of each form, and how far the products in 4 bits are from each other."""
    x = jax.random.normal(jax.random.key(0), (tokens, matrix.inputs), _BFLOAT16)
    row, found = dict[str, Any](), list[Float[Array, "T N"]]()
    for form in forms:
        run, weights = _product(matrix, form), _weights(matrix, form, 0)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        count = calls_worth_timing(max(size / 4e12, 4e-6))
        held = [_weights(matrix, form, seed) for seed in range(min(count, int(CACHE_BYTES / size) + 1))]
        timing = time_calls(run, [(x + n, held[n % len(held)]) for n in range(count)])
        row[f"{form}, us"] = round(1e6 * timing.median, 1)
        row[f"{form}, share"] = round(size / timing.median / roof, 3)
        if form.startswith("4 bits"):
            found.append(jax.jit(run)(x, weights).astype(jnp.float32))
    if len(found) == 2:
        row["difference"] = float(jnp.abs(found[0] - found[1]).max() / jnp.abs(found[0]).max())
    return row


def _product(matrix: Matrix, form: Form) -> Callable[[Array, Any], Float[Array, "T N"]]:
    """Return the product of a form, with the activation behind it if there is one."""
    unit = matrix.gated
    if form.endswith("Mosaic"):
        return lambda x, weights: dense.matmul(x, weights, unit)
    plain: Callable[[Array, Any], Array] = jnp.matmul if form == "16 bits on XLA" else int4.matmul

    def run(x: Array, weights: Any) -> Float[Array, "T N"]:
        out = plain(x, weights)
        return out if unit is None else glu(unit, *jnp.split(out, 2, axis=1))

    return run


def _weights(matrix: Matrix, form: Form, seed: int) -> Array | Int4 | Dense:
    """Return random weights, whose results are of about unit size."""
    key, size = jax.random.key(seed), (matrix.inputs, matrix.outputs)
    if form.startswith("16 bits"):
        plain: Array = jax.random.normal(key, size, _BFLOAT16) * jnp.asarray(matrix.inputs**-0.5, _BFLOAT16)
        return plain if form == "16 bits on XLA" else DensePlain(plain)
    codes = jax.random.bits(key, (matrix.inputs // 2, matrix.outputs), jnp.uint8)
    groups = matrix.inputs // _GROUP, matrix.outputs
    scales = jnp.full(groups, matrix.inputs**-0.5 / 5, _BFLOAT16)
    stored = Int4(codes, scales, jnp.full(groups, 8, jnp.uint8))
    return stored if form == "4 bits on XLA" else DenseTiles(jax.jit(int4_tiles.tiles)(stored))


if __name__ == "__main__":
    main()
