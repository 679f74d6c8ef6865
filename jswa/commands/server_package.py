"""Finds the HTTP server, which ships beside the engine: in a wheel as `jswa/_server`, in a checkout as `server/`.

It is loaded by its path, as `jswa._server`. `import server` would take whatever folder or file of that name comes first
on the path, and `python -m` puts the current folder there.
"""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from jswa.errors import ConfigError

_NAME = "jswa._server"
_HOME = Path(__file__).resolve().parent.parent


def load_server(module: str) -> ModuleType:
    """A module of the server. Raises ConfigError where the server, or what it needs, is not installed."""
    if _NAME not in sys.modules:
        folder = _folder()
        spec = importlib.util.spec_from_file_location(
            _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = package
        spec.loader.exec_module(package)
    try:
        return import_module(f"{_NAME}.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jswa"):
            raise
        raise ConfigError("server", error.name, "is not installed: `pip install jswa[server]`") from error


def _folder() -> Path:
    shipped, checkout = _HOME / "_server", _HOME.parent
    if (shipped / "__init__.py").is_file():
        return shipped
    # Beside an installed package anything may be called `server`; beside a checkout's sources it is ours.
    if (checkout / "pyproject.toml").is_file() and (checkout / "server" / "__init__.py").is_file():
        return checkout / "server"
    raise ConfigError("server", str(shipped), "is missing: this installation of jswa has no server")
