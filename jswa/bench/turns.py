"""The load of conversations: clients that are ready take turns, each with one request at a time."""

import asyncio
import random
import time
from collections.abc import Sequence

from jswa.bench.client import Server, connected, send, warm_up
from jswa.bench.config import BenchConfig
from jswa.bench.conversations import REQUESTS, Conversation, conversations
from jswa.bench.rounds import TurnRecord
from jswa.errors import ConfigError


async def converse(config: BenchConfig, talks: Sequence[Conversation]) -> tuple[list[TurnRecord], float]:
    """Hold the conversations. Return the records of their turns, and the seconds that the run took.

    The warm-up says something else, so that it caches nothing of them. Raises ConfigError if it fails, or if a first
    request cannot fit the context.
    """
    async with connected(config) as server:
        _set_limit(talks, config.max_model_len, server.max_model_len)
        lengths = REQUESTS._replace(input_words=config.lengths.input_words, output_tokens=config.lengths.output_tokens)
        for other in conversations(config.warmup, lengths, f"warm-up {config.seed}"):
            await warm_up(server, other.ask(config.endpoint), config)
        begin = time.perf_counter()
        return await _measured(server, talks, config, begin), time.perf_counter() - begin


def _set_limit(talks: Sequence[Conversation], given: int | None, served: int | None) -> None:
    if given is not None and served is not None and given > served:
        raise ConfigError("max_model_len", given, f"must be at most the server's, {served}")
    limit, least = given or served, max(talk.next_tokens for talk in talks)
    if limit is not None and least > limit:
        why = "a first request and its answer have so many words and tokens: lower prefix_words, request or output"
        raise ConfigError("max_model_len", limit, f"must be at least {least}, since {why}")
    for talk in talks:
        talk.limit = limit


async def _measured(
    server: Server, talks: Sequence[Conversation], config: BenchConfig, begin: float
) -> list[TurnRecord]:
    """Send a turn when its client is ready, fewer than the most requests are in flight, and its arrival is due.

    A conversation ends with its last turn, before a request that might exceed the context, or at its first error.
    """
    order, gaps = random.Random(config.seed), random.Random(config.seed)
    ready, ended = list(talks), list[Conversation]()  # ended: clients that have ended a round
    running = dict[asyncio.Task[TurnRecord], Conversation]()
    records, latest = list[TurnRecord](), dict[Conversation, TurnRecord]()
    most, due = config.max_concurrency or len(talks), begin
    while ready or running:
        free, wait = bool(ready) and len(running) < most, max(0.0, due - time.perf_counter())
        if free and not wait:
            talk = ready.pop(order.randrange(len(ready)) if config.ready_queue_policy == "random" else 0)
            running[asyncio.create_task(_turn(server, talk, config, begin, latest.get(talk)))] = talk
            due = time.perf_counter() + (gaps.expovariate(config.request_rate) if config.is_open_loop else 0.0)
        elif running:
            done, _ = await asyncio.wait(running, timeout=wait if free else None, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                talk, record = running.pop(task), task.result()
                records.append(record)
                latest[talk] = record
                if record.error is None and not talk.ended:
                    ended.append(talk)
        else:
            await asyncio.sleep(wait)
        if not config.enable_round_barrier or not (ready or running):
            ready += ended
            ended.clear()
    return records


async def _turn(
    server: Server, talk: Conversation, config: BenchConfig, begin: float, before: TurnRecord | None
) -> TurnRecord:
    body = talk.ask(config.endpoint)
    start = time.perf_counter()
    record = TurnRecord(start - begin, client=talk.number, round=talk.rounds + 1, asked_tokens=body["max_tokens"])
    await send(server, body, record, start)
    if record.error is None:
        talk.answer(record.text)
        talk.count(record.prompt_tokens, record.completion_tokens)
        if before is not None:
            record.repeated_tokens = min(record.prompt_tokens, before.prompt_tokens + before.completion_tokens)
    return record
