"""Find and import the HTTP server, which ships with the engine: `jswa/_server` in a wheel, `server/` in a checkout.

The package is loaded by its path, under the name `jswa._server`. `import server` would load any folder or file of that
name that comes first on sys.path, and `python -m` puts the current folder first.
"""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from jswa.errors import ConfigError, install

_NAME = "jswa._server"
_HOME = Path(__file__).resolve().parent.parent


def load_server(module: str) -> ModuleType:
    """Import a module of the server. Raises ConfigError if the server or one of its dependencies is not installed."""
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
    return import_server_module(f"{_NAME}.{module}")


def import_server_module(name: str) -> ModuleType:
    """Import a module by its full name. Raises ConfigError if a dependency of the server is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jswa"):
            raise
        raise ConfigError("server", error.name, f"is not installed: {install('server')}") from error


def _folder() -> Path:
    shipped, checkout = _HOME / "_server", _HOME.parent
    if (shipped / "__init__.py").is_file():
        return shipped
    # Next to an installed package, `server` may be anybody's. In a checkout, next to pyproject.toml, it is jswa's.
    if (checkout / "pyproject.toml").is_file() and (checkout / "server" / "__init__.py").is_file():
        return checkout / "server"
    raise ConfigError("server", str(shipped), "is missing: this installation of jswa has no server")
