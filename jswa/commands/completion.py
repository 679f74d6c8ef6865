"""`jswa --install-completion`: what the shell completes."""

import contextlib

from cyclopts import App

from jswa.commands.options.help import ALL
from jswa.commands.server_package import load_server
from jswa.errors import ConfigError


def completed(app: App) -> App:
    """Return a program with the commands of `app`, in which `serve` and `bench serve` have all their options.

    Both have parsers of their own in `app`. Where one cannot be imported, the shell completes only its name.
    """
    whole = App(
        name=app.name,
        help_flags=[*app.help_flags, ALL],
        version_flags=app.version_flags,
        help_format="plaintext",
        help_formatter=app.help_formatter,
        default_parameter=app.default_parameter,
    )
    own: dict[str, App] = {}
    with contextlib.suppress(ConfigError):
        own["serve"] = load_server("cli").parser()
    with contextlib.suppress(ConfigError):
        from jswa.bench.cli import parser

        own["bench"] = App(name="bench", help=app["bench"].help)
        own["bench"].command(parser(), name="serve")
    for name in app:
        if not name.startswith("-"):
            whole.command(own.get(name, app[name]), name=name)
    whole.register_install_completion_command()
    return whole
