"""What commands print on stderr while a model is loaded: the lines of `jswa.stages`."""

import logging
import sys

from jswa.stages import LOG


class _Stderr(logging.Handler):
    """Prints lines on the stderr of the moment: in one process each command may have another."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def show_start(model: str, *, stats: bool = False) -> None:
    """Show the lines of the start from now on, and say that the model is loaded. `stats`: show all lines at INFO."""
    shown = logging.getLogger("jswa") if stats else LOG
    shown.handlers = [_Stderr()]
    shown.setLevel(logging.INFO)
    LOG.info("loading %s", model)
