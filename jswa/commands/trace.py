"""Look at and run again the plans that JSWA_DUMP_PLANS=FILE wrote.

python -m jswa.commands.trace show FILE      prints one line per step
python -m jswa.commands.trace replay FILE    runs the steps again, without a scheduler, on the model that they were made
                                             for, and checks that the tokens are the same
"""

import os
import sys
from pathlib import Path

from jswa.errors import JswaError
from jswa.storage.plan_trace import read


def replay(path: Path) -> int:
    """Run a trace's steps in order on a fresh engine's runner; the number of sampled tokens that differ."""
    from jswa.llm import LLM

    header, steps = read(path)
    os.environ.pop("JSWA_DUMP_PLANS", None)  # it may still name this very file
    differ = 0
    with LLM(header["model"], **header["options"]) as llm:
        for plan, tokens in steps:
            again = llm.engine.runner.launch(plan).tokens()
            differ += int(((again != tokens) & (plan.samples != 0)).sum())
    return differ


def main() -> None:
    """`show` or `replay` a trace."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("show", "replay"):
        raise SystemExit("usage: python -m jswa.commands.trace show|replay FILE")
    try:
        _run(sys.argv[1], Path(sys.argv[2]))
    except (JswaError, OSError) as error:
        raise SystemExit(f"jswa.commands.trace: {error}") from None


def _run(command: str, path: Path) -> None:
    if command == "replay":
        differ = replay(path)
        print(f"{differ} tokens differ")
        raise SystemExit(int(differ > 0))
    _, steps = read(path)
    for number, (plan, tokens) in enumerate(steps):
        rows = " ".join(f"{s}:{a}+{n}" for s, a, n in zip(plan.row_ids, plan.starts, plan.counts, strict=True))
        print(f"{number}: {plan.num_rows} rows, {plan.num_tokens} tokens, {len(plan.moves)} moves | {rows} | {tokens}")


if __name__ == "__main__":
    main()
