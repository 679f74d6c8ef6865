"""The `jswa` command and its subcommands; `trace` is run as `python -m jswa.commands.trace`."""
