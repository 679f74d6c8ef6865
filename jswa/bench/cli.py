"""The command line of `jswa bench serve`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from jswa.commands.options.groups import grouped, whole_lines
from jswa.commands.options.help import formatter, parser_of
from jswa.errors import ConfigError, install

try:
    from jswa.bench.config import BenchConfig
    from jswa.bench.load import main as run
except ModuleNotFoundError as error:
    raise ConfigError("bench", error.name, f"is not installed: {install('bench')}") from error

GROUPS = {
    "Server": ("base_url", "model", "endpoint", "api_key", "timeout"),
    "Load": ("num_prompts", "warmup", "request_rate", "max_concurrency", "seed"),
    "Prompts": ("prompts", "input_words", "prefix_words", "output_tokens"),
    "Conversations": (
        "clients", "rounds", "min_rounds", "sub_question", "range_ratio", "agentic", "max_model_len",
        "enable_round_barrier", "ready_queue_policy",
    ),
    "Report": ("goodput", "json", "plot"),
}  # fmt: skip
_Options = grouped(BenchConfig, GROUPS, {"input_words": "request", "output_tokens": "output"})
if TYPE_CHECKING:
    type Options = BenchConfig
else:
    Options = Annotated[_Options, Parameter(name="*", consume_multiple=1)]  # --goodput a b
_DEFAULTS = _Options()


@whole_lines
def serve(*, options: Options = _DEFAULTS) -> int:
    """Send requests to an OpenAI-compatible server and report latencies and throughput.

    Closed loop: --max-concurrency 16. Open loop: --request-rate 8, with Poisson arrivals. Conversations: --clients 10
    --rounds 10 --request 300 --output 300. The server's own token counts are used. TTFT, TPOT, ITL and goodput are
    defined as in the benchmarks of vLLM and SGLang.
    """
    return run(options)


def parser() -> App:
    """Return the parser of `jswa bench serve`."""
    return parser_of("jswa bench serve", serve)


def main(tokens: Sequence[str]) -> int:
    """Run `jswa bench serve` with these arguments and return the exit status. Raises JswaError."""
    app = parser()
    words, app.help_formatter = formatter([*tokens], ())
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    return int(command(*bound.args, **bound.kwargs) or 0)
