"""What commands print on stderr while a model is loaded: the lines of `jswa.stages`, and warnings."""

import logging
import sys

from jswa.stages import LOG


def show_start(model: str, *, stats: bool = False) -> None:
    """Show the lines of the start from now on, and say that the model is loaded. `stats`: show all lines at INFO."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    (logging.getLogger("jswa") if stats else LOG).setLevel(logging.INFO)
    LOG.info("loading %s", model)
