"""Compile sampling for an H200 on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.small.sampling [--only NAME] [--write]

Checked: no spilled registers, no temporaries but lists and one array as large as the logits, and that nothing is worse
than in gates/sampling.json, which `--write` writes. The speed is not measured.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import kernels
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import SAMPLING
from jswa.types import MAX_LOGPROBS
from tools import gates
from tools.aot import triton
from tools.aot.triton_facts import TritonFacts, gpu
from tools.cases.kernels.small.sampling import SHAPES

GATES = "sampling.json"
KERNELS = ("survey", "draw")
_LISTS = 12_000_000  # bytes


class Found(NamedTuple):
    """A compiled call.

    Attributes:
        kernels: by name.
        temporaries: bytes, beside the logits.
    """

    kernels: dict[str, TritonFacts]
    temporaries: int


def main() -> None:
    """Print the table. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    card, faults, figures = gpu("h200"), [], dict[str, dict[str, float]]()
    print(f"{'logits':26}{'kernel':10}registers spills shared memory blocks/SM temporaries, MB")
    for name, (rows, vocab) in SHAPES.items():
        if options.only not in name:
            continue
        found = compile_call(rows, vocab)
        for kernel, facts in found.kernels.items():
            blocks = facts.blocks_per_sm(card)
            print(
                f"{name:26}{kernel:10}{facts.registers:9}{facts.spills:7}{facts.smem:14}{blocks:10}"
                f"{found.temporaries / 1e6:16.1f}"
            )
            figures[f"{kernel}, {name}"] = {"spills": facts.spills, "smem": facts.smem, "blocks_per_sm": blocks}
            faults += [f"{kernel}, {name}: {facts.spills} bytes spilled"] if facts.spills else []
        figures[name] = {"temporaries": found.temporaries}
        if found.temporaries >= 1.1 * 4 * rows * vocab + _LISTS:
            faults.append(f"{name}: {found.temporaries} bytes of temporaries, and the logits have {4 * rows * vocab}")
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    sys.exit("\n".join([*faults, *gates.worse(figures, GATES)]) or None)


def compile_call(rows: int, vocab: int) -> Found:
    """Compile the sampling of rows that may have constraints, with log probabilities: all that the kernels can do."""
    card = gpu("h200")

    def sample(
        logits: jax.Array, positions: jax.Array, columns: jax.Array, logits_state: Any, finite: jax.Array
    ) -> Any:
        found = kernels.sample(logits, positions, Sampling.of(columns), logits_state, finite, top=MAX_LOGPROBS)
        return found.tokens, found.logprobs

    with triton.compiling_for(card) as sharding:

        def of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

        tables = jax.tree.map(
            lambda table: of(table.shape, table.dtype), jax.eval_shape(lambda: init_logits_state(8, vocab))
        )
        numbers, columns = of((rows,), jnp.int32), of((rows, len(SAMPLING)), jnp.int32)
        triton.forget_kernels()
        arguments = of((rows, vocab), jnp.float32), numbers, columns, tables, of((rows,), bool)
        compiled = jax.jit(sample).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return Found(
        {name_of(dump, KERNELS): triton.read_facts(dump, card) for dump in sorted(triton.dumped())},
        memory.temp_size_in_bytes,
    )


def name_of(dump: Path, names: Sequence[str]) -> str:
    """Return which of the names the kernel of a dump has."""
    (ptx,) = dump.glob("*.ptx")
    return next(name for name in names if f".entry {name}" in ptx.read_text())


if __name__ == "__main__":
    main()
