"""The command line of `jswa bench serve`."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

from jswa.errors import ConfigError

try:
    from jswa.bench.load import BenchConfig
    from jswa.bench.load import main as run
except ModuleNotFoundError as error:
    raise ConfigError("bench", error.name, "is not installed: `pip install jswa[bench]`") from error

_DEFAULTS = BenchConfig()


def serve(*, options: Annotated[BenchConfig, Parameter(name="*")] = _DEFAULTS) -> int:
    """Load any server with OpenAI's API, and report what its clients get.

    Closed loop: --max-concurrency 16. Open loop: --request-rate 8, arrivals of a Poisson process. Token counts are the
    server's. TTFT, TPOT, ITL and goodput are defined as by vLLM's and SGLang's benchmarks.
    """
    return run(options)


def main(tokens: Sequence[str]) -> int:
    """Run it with these arguments; the exit status. Raises JswaError."""
    app = App(name="jswa bench serve", version_flags=[])
    app.default(serve)
    command, bound, _ = app.parse_args(tokens)
    return int(command(*bound.args, **bound.kwargs) or 0)
