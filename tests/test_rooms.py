"""Rules of the repository that no other tool checks: private state, sizes of folders, circles, who imports whom.

Everything is read from the syntax trees: imports inside functions and below `if TYPE_CHECKING` count.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("jswa", "pallas_kernels", "server", "benchmarks", "tools", "tests")
MOST_MODULES = 12  # with ten there were folders of two modules, made for the number

# Private names of others that tests and benchmarks may use, with the reason.
ALLOWED = {
    "_replace": "a public method of named tuples",
    "_asdict": "a public method of named tuples",
    "_fields": "a public attribute of named tuples",
    "_exit": "os._exit is documented",
    "_run_exitfuncs": "os._exit skips the functions of atexit, and nothing public runs them",
    "_attn_implementation": "transformers names its attention nowhere else",
    "_dequantize_one": "transformers unpacks a single tensor nowhere else; only for making fixtures",
    "_init_args_hst": "Triton's interpreter has no public way to take arrays that are not torch's",
    "_restore_args_dev": "Triton's interpreter has no public way to take arrays that are not torch's",
    "_patch_lang": "Triton's interpreter prepares its language in each call, and has no public way to do it once",
    "_LangPatchScope": "what `_patch_lang` returns",
    "_get_key_and_transform_mapping": "tunix has its table of a checkpoint's names nowhere else",
}
# Folders that may hold more modules than others, with the reason.
LARGE = {
    "jswa/model/hf": "a module for each kinship of model families",
    "tests/parity/cases": "a module for each kinship of model families",
}
# Modules of a folder that do not count.
FACE = {"__init__", "__main__", "version"}
# Calls that open or copy a file by its path, or let a library do so.
OPENS = {
    *("open", "open_code", "fdopen", "FileIO", "read_text", "read_bytes", "copyfile", "copytree", "copy2"),
    *("mmap", "memmap", "fromfile", "loadtxt", "genfromtxt", "safe_open", "load_file", "from_file", "from_pretrained"),
}
# Modules with such calls: how many, and why no file of a checkpoint is opened there but by the one reader.
OPENERS = {
    "jswa/storage/checkpoint_files.py": (4, "the reader of checkpoints"),
    "jswa/bench/load.py": (1, "prompts that the user names"),
    "jswa/building/build.py": (1, "writes the trace that the user names"),
    "jswa/cache/disk/records.py": (4, "pages that jswa has written"),
    "jswa/cache/disk/store.py": (1, "a lock of jswa's own"),
    "jswa/commands/chat/slash.py": (2, "the conversation and images, in files that the user names"),
    "jswa/commands/chat/tools.py": (1, "tools that the user names"),
    "jswa/commands/doctor.py": (1, "the driver's version in /proc"),
    "jswa/commands/evaluate.py": (1, "task sets, which the user names"),
    "jswa/commands/task_sets.py": (1, "task sets, which the user names"),
    "jswa/exec/compile/store.py": (4, "programs that jswa has compiled, its sources, and /proc/cpuinfo"),
    "jswa/forms/base/panels.py": (1, "memory without a file"),
    "jswa/frontend/pictures.py": (1, "images that the user names"),
    "jswa/gguf/outline.py": (1, "writes a copy of a header"),
    "jswa/plan/trace.py": (1, "a trace that the user names"),
    "jswa/storage/convert.py": (1, "writes the copy"),
    "jswa/storage/folders.py": (1, "waits for what was written"),
    "jswa/storage/persist.py": (2, "a saved cache, which is trusted as code is"),
    "server/config_file.py": (1, "the operator's config file"),
    "server/gate/key_file.py": (1, "keys, in a file that the operator names"),
    "server/launch.py": (1, "a template that the operator names"),
    "server/pages/files.py": (1, "the server's own pages"),
    "server/killable/worker.py": (3, "stdin and stdout of the process, and its memory in /proc"),
    "pallas_kernels/attention/tuned.py": (1, "tunings that ship with jswa"),
    "pallas_kernels/cpu/build.py": (3, "sources that ship with jswa, and a header of jaxlib"),
    "pallas_kernels/cpu/first_use.py": (2, "the library that jswa has compiled, and its lock"),
}
# Tests of benchmarks: no other test may import these.
TESTS_OF_BENCHMARKS = ("tests/unit/benchmarks", "tests/e2e/benchmarks", "tests/scale")


@cache
def trees(folder: str) -> dict[Path, ast.Module]:
    """The syntax trees of all modules below a folder."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def module_name(path: Path) -> str:
    """The dotted name of a module; a package's is that of its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each private name that code takes from anything but `self`, `cls` or its own module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_private(node.attr) and not own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in CODE:
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            # getattr(x, "_name"), monkeypatch.setattr(x, "_name", ...), patch.object(x, "_name", ...)
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = called in ("getattr", "setattr", "delattr", "hasattr", "object")
            if names and isinstance(name := node.args[1].value, str) and is_private(name):
                yield node.lineno, name


def imports(path: Path, tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules, of those given, that a module imports anywhere; importing a name counts as importing its module."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= (names & modules) | ({base} if names - modules else set())
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen, left = set(), list(graph[start])
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += graph[node]
        return seen

    reach = {node: reached(node) for node in graph}
    groups = {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in graph if n in reach[n]}
    return sorted(map(list, groups))


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_private_state_stays_private(folder: str) -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees(folder).items()
        for line, name in private_names(tree)
        if name not in ALLOWED
    ]
    assert not found, "private names of other modules: use or add a public one"


@pytest.mark.parametrize(
    "code",
    [
        "engine._scheduler.check()",
        "from jswa.engine import _log",
        "getattr(engine, '_scheduler')",
        "patch.setattr(engine, '_scheduler', None)",
        "patch.object(step, '_attend', None)",
    ],
)
def test_every_use_of_private_state_is_seen(code: str) -> None:
    assert len(list(private_names(ast.parse(code)))) == 1


def test_own_private_state_is_allowed() -> None:
    code = "self._a\ncls._b\nsuper().__init__()\nfrom jswa import __version__\nfrom os import _exit"
    assert not list(private_names(ast.parse(code)))


@pytest.mark.parametrize("folder", CODE)
def test_no_folder_has_more_modules_than_a_reader_can_keep_in_mind(folder: str) -> None:
    counts: dict[str, list[str]] = {}
    for path in trees(folder):
        if path.stem not in FACE:
            counts.setdefault(path.parent.as_posix(), []).append(path.stem)
    large = {name: modules for name, modules in counts.items() if len(modules) > MOST_MODULES and name not in LARGE}
    assert not large


def opened(tree: ast.AST) -> list[int]:
    """The lines of the calls that open files; reading an open file is none of them."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = ((call.lineno, getattr(call.func, "attr", getattr(call.func, "id", ""))) for call in calls)
    return [line for line, name in names if name in OPENS]


def test_one_module_opens_the_files_of_checkpoints() -> None:
    """A new call that opens a file goes through jswa/storage/checkpoint_files.py, or is listed here with its reason."""
    code = {path: tree for folder in ("jswa", "pallas_kernels", "server") for path, tree in trees(folder).items()}
    found = {path.as_posix(): lines for path, tree in code.items() if (lines := opened(tree))}
    assert {path: len(lines) for path, lines in found.items()} == {path: many for path, (many, _) in OPENERS.items()}


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "path.open('rb')",
        "os.fdopen(os.dup(1))",
        "tokenizers.Tokenizer.from_file(path)",
        "(folder / name).read_text()",
        "shutil.copyfile(path, other)",
        "AutoConfig.from_pretrained(folder)",
    ],
)
def test_every_way_to_open_a_file_is_seen(code: str) -> None:
    assert len(opened(ast.parse(code))) == 1


def test_no_modules_import_each_other() -> None:
    code = {path: tree for folder in ("jswa", "pallas_kernels", "server") for path, tree in trees(folder).items()}
    modules = {module_name(path) for path in code}
    graph = {module_name(path): imports(path, tree, modules) for path, tree in code.items()}
    assert sum(map(len, graph.values())) > len(graph), "the imports were not read"
    assert not circles(graph)


def test_a_circle_is_seen() -> None:
    graph: dict[str, set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]


def test_benchmarks_and_tools_import_no_tests() -> None:
    modules = {module_name(path) for path in trees("tests")} | {"tests"}
    for folder in ("benchmarks", "tools", "jswa", "server", "pallas_kernels"):
        for path, tree in trees(folder).items():
            assert not imports(path, tree, modules), path


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    modules = {module_name(path) for path in trees("benchmarks")} | {"benchmarks"}
    for path, tree in trees("tests").items():
        if not path.as_posix().startswith(TESTS_OF_BENCHMARKS):
            assert not imports(path, tree, modules), path


def form_records() -> set[str]:
    """The names of the classes that hold matrices: those that have one of the forms' methods."""
    methods = {"times", "scores", "operands", "expert", "numbers"}
    return {
        node.name
        for tree in (*trees("pallas_kernels").values(), *trees("jswa").values())
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and methods & {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    }


def test_nobody_asks_a_matrix_for_its_form() -> None:
    """What differs between forms is a method of their records, or a field of `jswa.forms.base.form.Form`."""
    records, found = form_records(), []
    assert {"Plain", "Quantized", "Int4", "Mxfp4", "Panels", "Tiles8", "DenseTiles"} <= records
    for path, tree in (*trees("jswa").items(), *trees("pallas_kernels").items()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                found += [f"{path}:{node.lineno} {name}" for name in asked & records]
    assert not found
