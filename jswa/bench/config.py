"""The options of `jswa bench serve`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from jswa.bench.conversations import AGENTS, CHATS, REQUESTS, Lengths
from jswa.errors import ConfigError

# Options of conversations alone, and of single requests alone.
_OF_TURNS = (
    "rounds", "min_rounds", "sub_question", "range_ratio", "agentic", "max_model_len", "enable_round_barrier",
    "ready_queue_policy",
)  # fmt: skip
_OF_REQUESTS = ("num_prompts", "prompts")


@dataclass(frozen=True)
class BenchConfig:
    """Options of `jswa bench serve`. Names follow vLLM if vLLM has the option, and SGLang's for conversations.

    Attributes:
        base_url: URL of the server, with or without /v1.
        model: Model name to send with each request. Default: the first model that the server lists.
        endpoint: Send requests to /v1/completions or to /v1/chat/completions.
        api_key: API key to send. Default: none.
        num_prompts: Number of requests to send.
        warmup: Number of requests to send before the measurement; they do not count.
        request_rate: Mean requests per second; arrivals are a Poisson process (open loop). With --clients an arrival
            waits until a client is ready. Default: send all requests at once.
        max_concurrency: Maximum number of requests in flight; without --request-rate this is the closed loop. Default:
            no limit.
        prompts: File with one JSON object per line, {"prompt": …} or {"messages": …}. Default: random words.
        input_words: Words per random prompt, after the shared prefix. With --clients: of a client's first message. The
            words are so short that most tokenizers have a token for each; the report has the server's counts. Default:
            100; with --clients 300; with --agentic 500.
        prefix_words: Words of a prefix that all random prompts share. With --clients it is the system's message.
            Default: 0; with --agentic 8000.
        output_tokens: Tokens to generate per request; the model's end tokens are ignored. Default: 64; with --clients
            300; with --agentic 200.
        clients: Number of clients that each hold a conversation. Every request repeats all that was said, with the
            server's answers, and adds a message. A client sends it when the answer before has ended. Default: single
            requests.
        rounds: Requests of a conversation. Default: 10; with --agentic 200.
        min_rounds: Fewest requests of a conversation; each draws its number between this and --rounds. Default: as
            --rounds; with --agentic 20.
        sub_question: Words of a client's later messages. Default: as --request; with --agentic 120.
        range_ratio: Least share of the words and tokens of a turn; each turn draws its own, from this share to all.
            Default: 1; with --agentic 0.5.
        agentic: Hold conversations as agents do: a long prefix that all share (instructions and tools), many turns,
            short messages (results of tools) and short answers.
        max_model_len: Most tokens of a request with its answer. A conversation ends before a request that might have
            more; its history is never cut. Default: what the server's list of models says, or else no limit.
        enable_round_barrier: Begin each round together: when all clients have ended the one before.
        ready_queue_policy: Which client sends next if several are ready; fifo is the one that has waited longest.
        goodput: Latency limits in milliseconds, such as ttft:500, tpot:50 or e2el:2000. Goodput counts the requests
            that meet all of them.
        seed: Seed of prompts and arrivals. A cache may still have the prompts of a run with the same seed.
        timeout: Give up on a request if the server sends nothing for this many seconds.
        json: Write all figures, and the times of each request, to this JSON file.
        plot: Write plots of the latencies to this file (.png or .svg); needs matplotlib, of the extra `bench`.
    """

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    num_prompts: int = 100
    warmup: int = 1
    request_rate: float = float("inf")
    max_concurrency: int | None = None
    prompts: Path | None = None
    input_words: int | None = None
    prefix_words: int | None = None
    output_tokens: int | None = None
    clients: int | None = None
    rounds: int | None = None
    min_rounds: int | None = None
    sub_question: int | None = None
    range_ratio: float | None = None
    agentic: bool = False
    max_model_len: int | None = None
    enable_round_barrier: bool = False
    ready_queue_policy: Literal["random", "fifo"] = "random"
    goodput: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 600.0
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        least = {"warmup": 0, "prefix_words": 0}
        least |= dict.fromkeys(("num_prompts", "max_concurrency", "input_words", "output_tokens", "clients"), 1)
        least |= dict.fromkeys(("rounds", "min_rounds", "sub_question", "max_model_len"), 1)
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(name, value, f"must be at least {low}")
        if not self.request_rate > 0:
            raise ConfigError("request_rate", self.request_rate, "must be above 0")
        if self.range_ratio is not None and not 0 <= self.range_ratio <= 1:
            raise ConfigError("range_ratio", self.range_ratio, "must be between 0 and 1")
        others, limit = (_OF_TURNS, "needs clients") if self.clients is None else (_OF_REQUESTS, "is not for clients")
        defaults = {field.name: field.default for field in fields(self)}
        for name in others:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(name, getattr(self, name), limit)
        if self.min_rounds is not None and self.min_rounds > self.lengths.rounds:
            raise ConfigError("min_rounds", self.min_rounds, f"must be at most rounds, {self.lengths.rounds}")

    @property
    def is_open_loop(self) -> bool:
        """Whether requests arrive at a rate."""
        return self.request_rate != float("inf")

    @property
    def lengths(self) -> Lengths:
        """The sizes that are given, and those of the kind of load for all others."""
        usual = REQUESTS if self.clients is None else AGENTS if self.agentic else CHATS
        given = {name: value for name in Lengths._fields if (value := getattr(self, name)) is not None}
        found = usual._replace(**given)
        return found._replace(min_rounds=min(found.min_rounds or found.rounds, found.rounds))
