"""Compile the elementwise kernels for an H200 on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.small.elementwise [--only NAME] [--json FILE] [--write]

Checked for each kernel: no spilled registers, no stack, that pages are updated in place, and that nothing is worse than
in gates/elementwise.json, which `--write` writes. The speed is not measured.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise.api import residual_norms, rotate_and_write
from pallas_kernels.elementwise.arguments import HeadWeights, Join, KVCells, Pairs, Parts
from pallas_kernels.experts.groups import row_count
from tools import gates
from tools.aot import device
from tools.aot.facts import KernelFacts, copies
from tools.cases.kernels.small.elementwise import NORM_LAYERS, ROPE_LAYERS, NormCase, RopeCase

GATES = "elementwise.json"


def main() -> None:
    """Print the table. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the facts to this file")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    compiled: list[tuple[NormCase | RopeCase, KernelFacts, list[str]]] = []
    compiled += [(case, *compile_norms(case)) for case in NORM_LAYERS if options.only in case.name]
    compiled += [(case, *compile_rope(case)) for case in ROPE_LAYERS if options.only in case.name]
    print(f"{'kernel':16} {'layer':28} {'tokens':>6} {'parts':>5} registers spills blocks/SM")
    for case, facts, _ in compiled:
        print(
            f"{facts.name:16} {case.name:28} {case.tokens:6} {case.parts:5} {facts.registers:9} {facts.spills:6}"
            f"{facts.blocks_per_sm:10}"
        )
    found = {f"{facts.name}, {case.name}, {case.tokens} tokens": facts.figures for case, facts, _ in compiled}
    if options.write:
        gates.write(found, GATES, {"jax": jax.__version__})
    if options.json:
        rows = [
            {"name": f"{case.name}, {case.tokens} tokens", "parts": case.parts, **asdict(facts)}
            for case, facts, _ in compiled
        ]
        options.json.write_text(json.dumps({"jax": jax.__version__, "kernels": rows}, indent=1) + "\n")
    faults = [
        f"{facts.name}, {case.name}, {case.tokens} tokens: {fault}"
        for case, facts, own in compiled
        for fault in (*own, *([f"{facts.spills} bytes spilled"] if facts.spills or facts.stack else []))
    ]
    sys.exit("\n".join([*faults, *gates.worse(found, GATES)]) or None)


def compile_norms(case: NormCase) -> tuple[KernelFacts, list[str]]:
    """Compile a call of `residual_norms`. Return its kernel, and what is wrong with the program."""
    dtype = jnp.dtype(case.dtype)
    row = _shape((case.width,), dtype)
    weights = [None if norm is None or not norm.weighted else row for norm in (case.post, case.pre)]
    wide = jnp.dtype("float32")
    branch: Any = Parts(
        _shape((case.parts, case.tokens, case.width), wide if case.parts > 1 else dtype), row if case.bias else None
    )
    if case.choices:
        pairs = case.tokens, case.choices
        values = _shape((row_count(case.tokens * case.choices, 32), case.width), dtype)
        factors, own = _shape(pairs, wide) if case.weighted else None, None
        if case.shared:
            own = _shape((case.shared, case.tokens, case.width), wide if case.shared > 1 else dtype)
        branch = Pairs(values, _shape(pairs, jnp.dtype("int32")), factors, own)
    given = branch, _shape((case.tokens, case.width), dtype), *weights

    def call(branch: Parts | Pairs, x: Any, post_weight: Any, pre_weight: Any) -> Any:
        return residual_norms(
            branch,
            x,
            Join(case.post, case.pre, case.keep, case.add),
            post_weight=post_weight,
            pre_weight=pre_weight,
            implementation="mosaic",
        )

    with device.captured() as found:
        jax.jit(call).lower(*device.on_h200(given)).compile()
    (facts,) = found
    return facts, []


def compile_rope(case: RopeCase) -> tuple[KernelFacts, list[str]]:
    """Compile a call of `rotate_and_write`. Return its kernel, and what is wrong with the program."""
    dtype, wide = jnp.dtype(case.dtype), jnp.dtype("float32")
    heads, columns, stored = case.call, case.call.columns, jnp.dtype(case.kv_dtype or dtype)
    sizes = heads.head_dim, heads.head_dim, heads.v_size
    cell = case.pages, case.layers_per_page, case.kv_heads, case.page_size, heads.row
    table, index = _shape((case.tokens, case.half), wide), _shape((case.tokens,), jnp.dtype("int32"))
    rows: Any = [
        None if norm is None or not norm.weighted else _shape((size,), dtype)
        for norm, size in zip(case.norms, sizes, strict=True)
    ]
    weights = HeadWeights(*rows)
    values = _shape((case.parts, case.tokens, columns), wide if case.parts > 1 else dtype)
    given = (
        _shape(cell, stored),
        values,
        _shape((columns,), dtype) if case.bias else None,
        weights,
        (table, table) if case.half else None,
        index,
        index,
        _shape((case.tokens,), wide) if case.temperature else None,
        _shape((2, case.kv_heads), wide) if case.scaled else None,
    )

    def call(
        kv: Any, values: Any, bias: Any, weights: Any, rope: Any, pages: Any, offsets: Any, factor: Any, scales: Any
    ) -> Any:
        cells = KVCells(pages, offsets, case.layers_per_page - 1, kv.shape, scales)
        parts = Parts(values, bias)
        return rotate_and_write(
            parts, kv, heads, weights, rope, cells, dtype, temperature=factor, implementation="mosaic"
        )

    with device.captured() as found:
        compiled = jax.jit(call, donate_argnums=0).lower(*device.on_h200(given)).compile()
    (facts,) = found
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    pages = stored.itemsize * math.prod(cell)
    faults = [f"copies {size} bytes" for size in copies(text) if size >= pages]
    if memory.alias_size_in_bytes < pages:
        faults.append("pages are not updated in place")
    return facts, faults


def _shape(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
