"""The `jswa` command and its subcommands."""
