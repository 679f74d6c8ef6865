"""The table of routes in docs/serving.md: `python -m tools.routes` writes it from the server's own list."""

import re
from pathlib import Path

from server.gate.routes import ROUTES, table
from server.gate.table import Route

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
_WHOSE = {"nobody": "none", "user": "API key", "operator": "admin key", "either": "API key or admin key"}
_REPLICAS = {"one": "one answers", "all": "all", "none": "refused"}
_PLACE = re.compile(r"(?<=<!-- routes -->\n).*?(?=<!-- /routes -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return a page with the table of today's routes."""
    return _PLACE.sub(lambda _: _markdown(), page)


def _markdown() -> str:
    files = [route for route in table(pages=True) if route not in ROUTES and route.path.startswith("/pages/")]
    shown = [route for route in table(pages=True) if route not in files]
    rows = [_row(route, route.path) for route in shown] + [_row(files[0], "/pages/…")]
    return "| route | needs | several replicas | what it does |\n|---|---|---|---|\n" + "".join(rows)


def _row(route: Route, path: str) -> str:
    path = re.sub(r"\{(\w+):path\}", r"{\1}", path)
    methods = ", ".join(route.methods)
    return f"| `{methods} {path}` | {_WHOSE[route.whose]} | {_REPLICAS[route.replicas]} | {route.about} |\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
