"""`python -m jswa` is the `jswa` command."""

from jswa.commands.cli import main

main()
