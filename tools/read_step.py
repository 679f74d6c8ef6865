"""Lists the functions of one greedy decode step, in the order in which they first run: what a reader of a step reads.

    python -m tools.read_step [--source | --json]

The engine runs `tiny` with XLA's kernels, one row, and all options off. There are three parts:

    host      a step inside of a page: plan, launch, apply
    pages     what further steps add to it: they end pages, and windows slide
    program   what is traced when the step's program is compiled

Only jswa/ and pallas_kernels/ count. A function's lines are those with code: no docstrings, comments or blank lines.
Lambdas and generators belong to the function around them; functions inside of another are counted by themselves.
"""

import argparse
import ast
import io
import json
import os
import sys
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

import jswa

ROOT = Path(jswa.__file__).parents[1]
ROOMS = ("jswa", "pallas_kernels")
PARTS = ("host", "pages", "program")
XLA = {"kernels": "xla"}
_PROMPT = 20  # tokens: the first step that is watched begins no page
_BEFORE, _AFTER = 4, 200  # steps before the first that is watched, and after it: pages of 16 end, windows of 64 slide
_SKIPPED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_NAMED = _FUNCTION | ast.ClassDef


@dataclass(frozen=True)
class Function:
    """A function of the step.

    Attributes:
        file: its path below the root.
        first, last: its lines, decorators included.
        code: the lines with code that are no other listed function's.
    """

    part: str
    file: str
    name: str
    first: int
    last: int
    code: frozenset[int]


def main() -> None:
    """Print the functions, the totals of each file, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--source", action="store_true", help="print their source, in this order")
    shown.add_argument("--json", action="store_true", help="print the sums and the functions as JSON")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    functions = functions_of(watched())
    if options.json:
        print(json.dumps(report(functions), indent=1))
    else:
        print("\n".join(sources(functions) if options.source else table(functions)))


def watched() -> list[tuple[str, CodeType]]:
    """Run an engine; return the code that runs in each part, in the order in which it first runs."""
    import jax

    from jswa.exec.compile.program import jit_step, step_arguments
    from jswa.exec.runner import Runner
    from jswa.llm import LLM
    from jswa.types import SamplingParams

    found: list[tuple[str, CodeType]] = []
    with LLM("tiny", max_num_seqs=1, max_num_batched_tokens=16, max_model_len=512, **XLA) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=_BEFORE + 1 + _AFTER + 4, ignore_eos=True)
        engine.add(engine.request("row", np.arange(100, 100 + _PROMPT, dtype=np.int32), params))
        for _ in range(_BEFORE):
            engine.step()
        with _watching("host", found):
            engine.step()
        with _watching("pages", found):
            for _ in range(_AFTER):
                engine.step()
        runner = engine.runner
        assert isinstance(runner, Runner)
        (config,) = (c for c in runner.configs if c.bucket.decode and c.part == "step" and c.variant == "none")
        arguments = step_arguments(config, runner.params, runner.state)
        # What is made once for a model is made by now, also if the start took its programs from files.
        jit_step(config, runner.params, runner.state).lower(*arguments)
        jax.clear_caches()  # type: ignore[no-untyped-call] # what was traced would not be traced again
        with _watching("program", found):
            jit_step(config, runner.params, runner.state).lower(*arguments)
    return found


@contextmanager
def _watching(part: str, found: list[tuple[str, CodeType]]) -> Iterator[None]:
    """Append all code that begins to run inside of the block; each once."""
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def begins(code: CodeType, _offset: int) -> Any:
        if _is_ours(code.co_filename):
            found.append((part, code))
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "read_step")
    monitoring.register_callback(tool, monitoring.events.PY_START, begins)
    monitoring.restart_events()
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(tool)


@cache
def _is_ours(name: str) -> bool:
    path = Path(name)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS


def functions_of(found: Sequence[tuple[str, CodeType]], root: Path = ROOT) -> list[Function]:
    """Return the functions that code belongs to, each once. Bodies of modules and classes are none."""
    listed: dict[tuple[str, int], Function] = {}
    for part, code in found:
        file = Path(code.co_filename).relative_to(root).as_posix()
        around = [f for f in _functions_in(root / file) if f.first <= code.co_firstlineno <= f.last]
        own = code.co_name.startswith("<") or any(f.first == code.co_firstlineno for f in around)
        if around and own:
            innermost = max(around, key=lambda f: f.first)
            listed.setdefault((file, innermost.first), replace(innermost, part=part, file=file))
    return [
        replace(f, code=f.code.difference(*(g.code for g in listed.values() if _is_inside(g, f))))
        for f in listed.values()
    ]


def _is_inside(inner: Function, outer: Function) -> bool:
    return inner.file == outer.file and outer.first < inner.first and inner.last <= outer.last


@cache
def _functions_in(path: Path) -> list[Function]:
    """Return all functions of a file, each with all its lines of code."""
    text = path.read_text(encoding="utf-8")
    tree, code = ast.parse(text), _lines_of_code(text)

    def below(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTION):
                first, last = min([child.lineno, *(d.lineno for d in child.decorator_list)]), child.end_lineno or 0
                lines = frozenset(range(first, last + 1)) & code
                yield Function("", "", prefix + child.name, first, last, lines)
            yield from below(child, f"{prefix}{child.name}." if isinstance(child, _NAMED) else prefix)

    return list(below(tree, ""))


def _lines_of_code(text: str) -> frozenset[int]:
    """Return the lines of a file that hold more than a docstring or a comment."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | _NAMED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return frozenset(lines)


def sums(functions: Sequence[Function]) -> dict[str, int]:
    """Return the numbers of functions, of lines of code and of files."""
    lines = sum(len(f.code) for f in functions)
    return {"functions": len(functions), "lines": lines, "files": len({f.file for f in functions})}


def report(functions: Sequence[Function]) -> dict[str, Any]:
    """Return the sums, those of each part, and a line for each function, as JSON."""
    parts = {part: sums([f for f in functions if f.part == part]) for part in PARTS}
    rows = [{"part": f.part, "file": f.file, "line": f.first, "name": f.name, "lines": len(f.code)} for f in functions]
    return {**sums(functions), "parts": parts, "read": rows}


def table(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the functions by part, then the files with their functions and lines, then the sums."""
    for part in PARTS:
        of_part = [f for f in functions if f.part == part]
        yield f"{part}: {_said(sums(of_part))}"
        yield from (f"{len(f.code):6}  {f.name:44} {f.file}:{f.first}" for f in of_part)
    yield "\nby file: lines, functions"
    for file in sorted({f.file for f in functions}):
        of_file = sums([f for f in functions if f.file == file])
        yield f"{of_file['lines']:6} {of_file['functions']:4}  {file}"
    yield f"\nall: {_said(sums(functions))}"


def _said(found: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in found.items())


def sources(functions: Sequence[Function]) -> Iterator[str]:
    """Yield the source of the functions. One that contains others is printed whole, and these are not repeated."""
    for f in functions:
        if not any(_is_inside(f, outer) for outer in functions):
            lines = (ROOT / f.file).read_text(encoding="utf-8").splitlines()
            yield f"# {f.part}: {f.file}:{f.first} {f.name}\n" + "\n".join(lines[f.first - 1 : f.last]) + "\n"


if __name__ == "__main__":
    main()
