"""Show or replay the step plans that an engine wrote to JSWA_DUMP_PLANS=FILE.

python -m jswa.commands.trace show FILE      prints one line per step
python -m jswa.commands.trace replay FILE    runs the steps again on the same model, without a scheduler, and checks
                                             that they sample the same tokens
"""

import os
import sys
from pathlib import Path

from jswa.errors import JswaError
from jswa.plan.trace import read


def replay(path: Path) -> int:
    """Run the steps of a trace in order on a new engine's runner. Return the number of sampled tokens that differ."""
    from jswa.llm import LLM

    header, steps = read(path)
    os.environ.pop("JSWA_DUMP_PLANS", None)  # or the new engine would write to FILE too
    differ = 0
    with LLM(header["model"], **header["options"]) as llm:
        for plan, tokens in steps:
            again = llm.engine.runner.launch(plan).tokens()
            differ += int(((again != tokens) & (plan.samples != 0)).sum())
    return differ


def main() -> None:
    """Run the command line: `show` or `replay`."""
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
