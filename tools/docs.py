"""The sources of the documentation's site: the Markdown of the repository, and reference pages generated from the code.

`python -m tools.docs FOLDER` writes them; `make docs` has sphinx read them, for which every link must lead somewhere.
"""

import ast
import dataclasses
import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

from jswa.cache.prefix.stats import CacheStats
from jswa.commands.options.groups import ENGINE, OTHER
from jswa.config import EngineConfig, Limits
from jswa.frontend.engine_protocol import Figures
from jswa.sched.outputs import SchedulerStats
from jswa.sched.steplog import StepStats
from server.core.counts import Counts, Load
from server.core.metrics import Snapshot, exposition
from server.core.service import Service
from server.http.app import create_app
from server.options import GROUPS, ServeConfig

ROOT = Path(__file__).parents[1]
COPIED = (
    "*.md",
    "docs/**/*",
    "tests/README.md",
    "benchmarks/README.md",
    "benchmarks/gpu/README.md",
    "benchmarks/results/cpu/*.png",
)
GUIDES = {
    "Begin": (
        "quickstart",
        "python",
        "serving",
        "embeddings",
        "kv-events",
        "answers",
        "structured-outputs",
        "pages",
        "models",
        "checkpoints",
    ),
    "Recipes": tuple(f"recipes/{path.stem}" for path in sorted((ROOT / "docs" / "recipes").glob("*.md"))),
    "Understand": (
        "how-it-works",
        "how-jswa-differs",
        "a-decode-step",
        "glossary",
        "numerics",
        "performance",
        "results",
    ),
    "Operate": (
        "operating",
        "deploy/README",
        "parallel",
        "kernels",
        "lora",
        "speculation",
        "rl",
        "troubleshooting",
        "coming-from",
        "evaluation",
    ),
}
REFERENCE = ("serve", "engine", "api", "metrics", "errors")
DESIGN = tuple(f"docs/design/{path.stem}" for path in sorted((ROOT / "docs" / "design").glob("*.md")))
REST = (
    "docs/README", *DESIGN, "docs/laws", "docs/adding-a-model", "docs/adding-a-weight-format",
    "docs/adding-a-sampling-parameter", "docs/log",
    "README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "tests/README", "benchmarks/README", "benchmarks/gpu/README",
)  # fmt: skip
CONF = """
project = "jswa"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "jswa"
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = []
suppress_warnings = ["myst.header", "misc.highlighting_failure", "toc.not_included"]
exclude_patterns = []
"""


def write(folder: Path) -> None:
    """Write all sources into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                to = folder / path.relative_to(ROOT)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
    (folder / "conf.py").write_text(CONF, encoding="utf-8")
    for name, text in {"index": index(), **reference()}.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    _copy_linked(folder)


def _copy_linked(folder: Path) -> None:
    """Copy the files of the repository to which pages link, and which are no pages."""
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s:]+)", page.read_text(encoding="utf-8")):
            source = (ROOT / page.relative_to(folder)).parent / target
            to = page.parent / target
            if source.is_file() and not to.exists():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, to)


def index() -> str:
    """Return the first page."""
    parts = [
        "# jswa\n\njswa serves language models in which most layers look back at a sliding window only, and keeps no"
        " more of the KV cache than those windows need. [Begin here](docs/quickstart.md).\n"
    ]
    chapters = {title: [f"docs/{name}" for name in names] for title, names in GUIDES.items()}
    chapters["Reference, made from the code"] = [f"reference/{name}" for name in REFERENCE]
    chapters["Project"] = list(REST)
    for title, names in chapters.items():
        parts.append(f"```{{toctree}}\n:caption: {title}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n")
    return "\n".join(parts)


def reference() -> dict[str, str]:
    """Return the generated pages by name."""
    return {
        "reference/serve": options("Options of `jswa serve`", ServeConfig, GROUPS),
        "reference/engine": options("Options of the engine", EngineConfig, ENGINE),
        "reference/api": api(),
        "reference/metrics": metrics(),
        "reference/errors": errors(),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def attributes(kind: type) -> dict[str, str]:
    """Return the texts of the attributes in the docstring of a class."""
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    listed = re.sub(r"\n {8}(?=\S)", " ", listed)
    return dict(re.findall(r"^ {4}(\w+): (.*)$", listed, re.MULTILINE))


def options(title: str, kind: type, groups: Mapping[str, Sequence[str]]) -> str:
    """Return the page of the options of a dataclass, in the groups of --help."""
    texts, hints = attributes(kind), get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    rest = [name for name in fields if not any(name in names for names in groups.values())]
    parts = [
        f"# {title}\n\nThe command line has `--NAME`, the environment `JSWA_NAME`, a YAML file of `--config` `NAME`.\n"
    ]
    for group, names in {**groups, **({OTHER: rest} if rest else {})}.items():
        rows = []
        for name in names:
            default = fields[name].default
            shown = "" if default in (None, (), "") else f"`{default}`"
            rows.append([f"`{name}`", f"`{_type_name(hints[name])}`", shown, texts[name]])
        parts.append(f"## {group}\n\n{table(('option', 'type', 'default', 'what'), rows)}\n")
    return "\n".join(parts)


def _type_name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"typing\.|pathlib\.|collections\.abc\.", "", name)


def schema() -> dict[str, Any]:
    """Return the OpenAPI description of the server."""
    state = SimpleNamespace(
        config=ServeConfig(served_model_name=("model",)), engine_thread=SimpleNamespace(call=None), draining=False
    )
    found: dict[str, Any] = create_app(cast(Service, state)).openapi()
    return found


def api() -> str:
    """Return the page of all routes, with the fields of their requests."""
    described = schema()
    schemas = described["components"]["schemas"]
    parts = ["# The API by route\n\nWhat the fields of generation do: [serving](../docs/serving.md). Errors:"
             " [errors](errors.md). `GET /openapi.json` has the same for programs.\n"]  # fmt: skip
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"## {method.upper()} {path}\n\n{operation['description']}\n")
            statuses = ", ".join(status for status in operation["responses"] if status != "200")
            if statuses:
                parts.append(f"Statuses besides 200: {statuses}.\n")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "$ref" in content:
                body = schemas[content["$ref"].rpartition("/")[2]]
                required = set(body.get("required", ()))
                rows = [
                    [f"`{name}`{' (required)' if name in required else ''}", _fits(one)]
                    for name, one in body.get("properties", {}).items()
                ]
                parts.append(table(("field", "accepted"), rows) + "\n")
    return "\n".join(parts)


_LIMITS = {
    "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
    "minLength": "characters, at least", "maxLength": "characters, at most", "minItems": "entries, at least",
    "maxItems": "entries, at most", "maxProperties": "entries, at most",
}  # fmt: skip


def _fits(field: Mapping[str, Any]) -> str:
    """Return in words what a field of a schema accepts."""
    found = [_fits(one) for one in field.get("anyOf", ()) if one.get("type") != "null"]
    if found:
        return " or ".join(found)
    if "$ref" in field:
        return "object"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "any value"))
    limits = [f"{words} {field[name]:,}" for name, words in _LIMITS.items() if name in field]
    inner = f" of {_fits(field['items'])}" if field.get("items") else ""
    return kind + inner + (f" ({', '.join(limits)})" if limits else "")


def metrics() -> str:
    """Return the page of all metrics, as a server without any request shows them."""
    rows = SchedulerStats(0, 0, 0, 0, 0, 1, 1, 0)
    cache = CacheStats(0, 0, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0)
    figures = Figures(rows, cache, StepStats(), None)
    snapshot = Snapshot(figures, Limits(1, 1, 1, 1, 2), 0, 0, 0, Load(), "up", 0.0)
    text = exposition("jswa", "model", Counts(), snapshot).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    labels = {name: re.findall(r'(\w+)="', shown) for name, shown in re.findall(r"^(\S+)\{(.*)\} ", text, re.MULTILINE)}
    lines = [
        [f"`{name}`", kinds[name], ", ".join(f"`{one}`" for one in labels.get(name, ()) if one != "model_name"), what]
        for name, what in re.findall(r"^# HELP (\S+) (.*)", text, re.MULTILINE)
    ]
    begin = (
        "# Metrics\n\n`GET /metrics` has them in Prometheus' text format. All have the label `model_name`; the prefix"
        " is that of `--metrics-prefix`. A board for Grafana: [deploying](../docs/deploy/README.md).\n\n"
    )
    return begin + table(("metric", "type", "labels", "what"), lines) + "\n"


def errors() -> str:
    """Return the page of the codes of the API's errors, and of the exceptions of Python."""
    found = sorted(set(_codes()))
    told = {code for code, _, message in found if message != "…"}
    rows = [
        [f"`{code}`", status, "" if message == "…" else message]
        for code, status, message in found
        if message != "…" or code not in told
    ]
    source = ast.parse((ROOT / "jswa" / "errors.py").read_text(encoding="utf-8"))
    tree = inspect.cleandoc(ast.get_docstring(source) or "").partition("\n\n")[2].partition("\n\n`")[0]
    return (
        '# Errors\n\n## Of the API\n\nThe body is `{"error": {"message", "type", "param", "code"}}`; `param`'
        " names the field. Routes of Anthropic's API have Anthropic's form.\n\n"
        + table(("code", "status", "message"), rows)
        + f"\n\n## In Python\n\nAll are in `jswa.errors`.\n\n```text\n{inspect.cleandoc(tree)}\n```\n"
    )


def _codes() -> Iterator[tuple[str, str, str]]:
    """Yield code, status and message of every `ApiError` that the server's sources make with a code."""
    for path in sorted((ROOT / "server").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "ApiError" or len(node.args) < 2:
                continue
            code = next((one.value for one in node.keywords if one.arg == "code"), None)
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value, _text(node.args[0]), _text(node.args[1])


def _text(node: ast.expr) -> str:
    """Return a message as the source has it, with `…` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
    return "…"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
