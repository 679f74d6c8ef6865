"""Compute what a row's KV takes and how many tokens fit in memory, for released models. Nothing is measured.

    python -m benchmarks.memory.kv --json benchmarks/results/computed/kv.json

The functions are those of `jswa capacity`, the configs those of the models on the hub (`tools.cases.hub_configs`).
Tokens = rows that fit x their length; a part of a row counts as that part. KV in bfloat16, pages of 64 tokens in jswa.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import result_file
from jswa.cache.layout import KVLayout
from jswa.commands.capacity.table import CapacityRow, table
from jswa.model.hf.config import parse_config
from tools.cases.hub_configs import CONFIGS

MODELS = ("gemma-3-27b", "gemma-4-31B", "gpt-oss-120b", "MiMo-V2-Flash/V2.5", "Llama-4-Scout", "Command-A-03-2025")
LENGTHS = (32_768, 131_072)
GIB = 2**30
MEMORY = 75 * GIB
_PAGE, _ITEMSIZE = 64, 2


def rows_of(model: str, lengths: tuple[int, ...]) -> list[CapacityRow]:
    """Return the rows of `jswa capacity` for a released model, at these lengths."""
    config = parse_config(CONFIGS[model], weights=False)
    layout = KVLayout.of(config, _PAGE)
    return table(config, layout, itemsize=_ITEMSIZE, memory=MEMORY, lengths=lengths)


def figures() -> Iterator[dict[str, Any]]:
    """Yield a row of the result file for each model and length."""
    for model in MODELS:
        for row in rows_of(model, LENGTHS):
            yield {
                "model": model,
                "length": row.length,
                "gib_jswa": row.bytes_here / GIB,
                "gib_full": row.bytes_full / GIB,
                "tokens_jswa": round(row.rows_here * row.length),
                "tokens_vllm": round(row.rows_grouped * row.length),
                "tokens_sglang": round(row.rows_fixed_ratio * row.length),
                "tokens_full": round(row.rows_full * row.length),
            }


def main() -> None:
    """Print the figures, and write them if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rows = list(figures())
    for row in rows:
        print(
            ", ".join(
                f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if args.json:
        peers = {"vllm": "0.33.0", "sglang": "0.5.23"}
        result_file.write(args.json, {"memory_gib": MEMORY // GIB, "peers": peers, "rows": rows})


if __name__ == "__main__":
    main()
