"""`python -m jswa` is the `jswa` command."""

from jswa.cli import main

main()
