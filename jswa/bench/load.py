"""The load of `jswa bench serve`: single requests, or conversations; then the report."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jswa.bench import rounds
from jswa.bench.client import Server, connected, send, warm_up
from jswa.bench.config import BenchConfig
from jswa.bench.conversations import conversations, words
from jswa.bench.report import RequestRecord, fill_cached, limits_of, plot, report, summary
from jswa.bench.turns import converse
from jswa.errors import ConfigError


def bodies(config: BenchConfig) -> list[dict[str, Any]]:
    """Return the JSON bodies of single requests, without the fields that all share. Raises ConfigError."""
    lengths = config.lengths
    most = {"max_tokens": lengths.output_tokens}
    if config.prompts is not None:
        try:
            given = [json.loads(line) for line in config.prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, ValueError) as error:
            raise ConfigError(
                "prompts", str(config.prompts), "must be a readable file with one JSON object per line"
            ) from error
        if not given:
            raise ConfigError("prompts", str(config.prompts), "must have at least one line")
        return [{**most, **given[index % len(given)]} for index in range(config.num_prompts)]
    chance = random.Random(config.seed)
    prefix = words(chance, lengths.prefix_words)
    texts = [f"{prefix} {words(chance, lengths.input_words)}".lstrip() for _ in range(config.num_prompts)]
    if config.endpoint == "chat":
        return [{**most, "messages": [{"role": "user", "content": text}]} for text in texts]
    return [{**most, "prompt": text} for text in texts]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times in seconds from the start: a Poisson process, or all 0 if the rate is infinite."""
    chance, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += chance.expovariate(rate) if rate != float("inf") else 0.0
    return found


async def run(config: BenchConfig) -> tuple[list[RequestRecord], float]:
    """Send single requests. Return their records and the seconds that the run took.

    Raises ConfigError if a request of the warm-up fails.
    """
    async with connected(config) as server:
        asked = bodies(config)
        for index in range(config.warmup):
            await warm_up(server, asked[index % len(asked)], config)
        return await _measured(server, asked, config)


async def _measured(
    server: Server, asked: list[dict[str, Any]], config: BenchConfig
) -> tuple[list[RequestRecord], float]:
    gate = asyncio.Semaphore(config.max_concurrency or len(asked))
    begin = time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        # In the closed loop a request starts when it is sent, in the open loop when it should have been sent.
        async with gate:
            start = begin + at if config.is_open_loop else time.perf_counter()
            return await send(server, body, RequestRecord(start - begin), start)

    times = arrivals(len(asked), config.request_rate, config.seed)
    records = await asyncio.gather(*(one(body, at) for body, at in zip(asked, times, strict=True)))
    return list(records), time.perf_counter() - begin


def main(config: BenchConfig) -> int:
    """Run the load, print the report and write the files. Return the exit status: 1 if a request failed."""
    slos = limits_of(config.goodput)
    if config.clients is None:
        records, seconds = asyncio.run(run(config))
        fill_cached(records)
        found = summary(records, seconds, slos)
        return _ended(config, records, found, report(found), plot)
    talks = conversations(config.clients, config.lengths, config.seed)
    turns, seconds = asyncio.run(converse(config, talks))
    fill_cached(turns)
    found = {**summary(turns, seconds, slos), **rounds.summary(turns, talks)}
    return _ended(config, turns, found, [*report(found), *rounds.report(turns, found)], rounds.plot)


def _ended[Record: RequestRecord](
    config: BenchConfig,
    records: Sequence[Record],
    found: dict[str, Any],
    lines: Sequence[str],
    draw: Callable[[Sequence[Record], Path], None],
) -> int:
    print("\n".join(lines))
    for error in sorted({record.error for record in records if record.error is not None})[:5]:
        print(f"error: {error}")
    if config.json is not None:
        each = [{name: value for name, value in vars(record).items() if name != "text"} for record in records]
        options = {k: str(v) for k, v in vars(config).items() if k not in ("api_key", "json", "plot")}
        config.json.write_text(json.dumps({"options": options, **found, "records": each}) + "\n")
    if config.plot is not None:
        draw(records, config.plot)
    return 1 if found["failed"] else 0
