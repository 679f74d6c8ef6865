"""The program of a front end: HTTP, templates, tokenizer and streams, for an engine in another process.

`Fleet` runs this file by its path. It never imports jax.
"""

import sys
from importlib import import_module


def main() -> None:
    """Serve until the engine's process says so, or ends."""
    root, package, control, counter = sys.argv[1:5]
    sys.path.append(root)
    if package.startswith("jswa."):
        server_package = import_module("jswa.commands.server_package")
        module = server_package.load_server("processes.serving")
    else:
        module = import_module(f"{package}.processes.serving")
    sys.exit(module.serve(int(control), int(counter)))


if __name__ == "__main__":
    main()
