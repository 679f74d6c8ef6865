"""The HTTP load generator of `jswa bench serve`: send requests to any OpenAI-compatible server and time the answers."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2

from jswa.bench.report import RequestRecord, limits_of, plot, report, summary
from jswa.commands.options.address import api_address
from jswa.errors import ConfigError

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class BenchConfig:
    """Options of `jswa bench serve`. Names follow vLLM if vLLM has the option.

    Attributes:
        base_url: URL of the server, with or without /v1.
        model: Model name to send with each request. Default: the first model that the server lists.
        endpoint: Send requests to /v1/completions or to /v1/chat/completions.
        api_key: API key to send. Default: none.
        num_prompts: Number of requests to send.
        warmup: Number of requests to send before the measurement; they do not count.
        request_rate: Mean number of requests per second; arrivals are a Poisson process (open loop). Default: send all
            requests at once.
        max_concurrency: Maximum number of requests in flight; without --request-rate this is the closed loop. Default:
            no limit.
        prompts: File with one JSON object per line, {"prompt": …} or {"messages": …}. Default: random words.
        input_words: Words per random prompt, after the shared prefix.
        prefix_words: Words of a prefix that all random prompts share.
        output_tokens: Tokens to generate per request; the model's end tokens are ignored.
        goodput: Latency limits in milliseconds, such as ttft:500, tpot:50 or e2el:2000. Goodput counts the requests
            that meet all of them.
        seed: Random seed of prompts and arrivals.
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
    input_words: int = 100
    prefix_words: int = 0
    output_tokens: int = 64
    goodput: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 600.0
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        low = {"num_prompts": 1, "warmup": 0, "max_concurrency": 1, "output_tokens": 1, "input_words": 1}
        for name, least in low.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        if not self.request_rate > 0:
            raise ConfigError("request_rate", self.request_rate, "must be above 0")


def bodies(config: BenchConfig) -> list[dict[str, Any]]:
    """Return the JSON bodies of the requests, without the model's name. Raises ConfigError."""
    shared: dict[str, Any] = {"max_tokens": config.output_tokens, "ignore_eos": True, "stream": True}
    shared |= {"stream_options": {"include_usage": True}}
    if config.prompts is not None:
        try:
            given = [json.loads(line) for line in config.prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, ValueError) as error:
            raise ConfigError(
                "prompts", str(config.prompts), "must be a readable file with one JSON object per line"
            ) from error
        if not given:
            raise ConfigError("prompts", str(config.prompts), "must have at least one line")
        return [{**shared, **given[index % len(given)]} for index in range(config.num_prompts)]
    chance = random.Random(config.seed)
    prefix = chance.choices(_WORDS, k=config.prefix_words)
    texts = [" ".join(prefix + chance.choices(_WORDS, k=config.input_words)) for _ in range(config.num_prompts)]
    if config.endpoint == "chat":
        return [{**shared, "messages": [{"role": "user", "content": text}]} for text in texts]
    return [{**shared, "prompt": text} for text in texts]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times in seconds from the start: a Poisson process, or all 0 if the rate is infinite."""
    chance, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += chance.expovariate(rate) if rate != float("inf") else 0.0
    return found


async def run(config: BenchConfig) -> tuple[list[RequestRecord], float]:
    """Send all requests. Return their records and the seconds that the run took.

    Raises ConfigError if a request of the warm-up fails.
    """
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=api_address(config.base_url), headers=headers, timeout=config.timeout, limits=limits
    ) as client:
        model = config.model or await _first_model(client)
        path = "/chat/completions" if config.endpoint == "chat" else "/completions"
        asked = [{"model": model, **body} for body in bodies(config)]
        for index in range(config.warmup):
            warm = await _send(client, path, asked[index % len(asked)], RequestRecord(0.0), time.perf_counter())
            if warm.error is not None:
                raise ConfigError("base_url", config.base_url, f"failed the warm-up request: {warm.error}")
        gate = asyncio.Semaphore(config.max_concurrency or len(asked))
        begin = time.perf_counter()

        async def one(body: dict[str, Any], at: float) -> RequestRecord:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            # In the closed loop a request starts when it is sent, in the open loop when it should have been sent.
            closed = config.request_rate == float("inf")
            async with gate:
                start = time.perf_counter() if closed else begin + at
                return await _send(client, path, body, RequestRecord(start - begin), start)

        times = arrivals(len(asked), config.request_rate, config.seed)
        records = await asyncio.gather(*(one(body, at) for body, at in zip(asked, times, strict=True)))
        return list(records), time.perf_counter() - begin


async def _first_model(client: httpx2.AsyncClient) -> str:
    try:
        response = await client.get("/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except httpx2.HTTPStatusError as error:
        limit = f"answers GET /models with status {error.response.status_code}"
        raise ConfigError("base_url", str(client.base_url), limit) from error
    except (httpx2.HTTPError, LookupError, ValueError) as error:
        raise ConfigError("base_url", str(client.base_url), f"lists no model: {type(error).__name__}") from error


async def _send(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], record: RequestRecord, start: float
) -> RequestRecord:
    """Send one request and fill in its record; times are in seconds since `start`."""
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                record.error = f"status {response.status_code}: {(await response.aread())[:200]!r}"
                return record
            async for event in _events(response):
                if "error" in event:
                    record.error = str(event["error"])[:200]
                    return record
                _add_event(record, event, time.perf_counter() - start)
    except httpx2.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.perf_counter() - start
    if record.error is None and not record.chunks:
        record.error = "the answer had no text"
    return record


def _add_event(record: RequestRecord, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            record.chunks.append(now)
            record.completion_tokens += 1  # replaced by the server's own count if it sends one
            break
    usage = event.get("usage")
    if usage:
        record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and not line.endswith("[DONE]"):
            yield json.loads(line[5:])


def main(config: BenchConfig) -> int:
    """Run the load, print the report and write the files. Return the exit status: 1 if a request failed."""
    slos = limits_of(config.goodput)
    records, seconds = asyncio.run(run(config))
    found = summary(records, seconds, slos)
    print("\n".join(report(found)))
    for error in sorted({record.error for record in records if record.error is not None})[:5]:
        print(f"error: {error}")
    if config.json is not None:
        each: Sequence[dict[str, Any]] = [vars(record) for record in records]
        options = {k: str(v) for k, v in vars(config).items() if k not in ("api_key", "json", "plot")}
        config.json.write_text(json.dumps({"options": options, **found, "records": each}) + "\n")
    if config.plot is not None:
        plot(records, config.plot)
    return 1 if found["failed"] else 0
