"""The HTTP client of `jswa bench serve`: it sends requests to any OpenAI-compatible server and times the answers."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx2

from jswa.bench.config import BenchConfig
from jswa.bench.report import RequestRecord
from jswa.commands.options.address import api_address
from jswa.errors import ConfigError


class Server(NamedTuple):
    """A server under load.

    Attributes:
        http: the open client.
        path: of the requests.
        shared: the fields that all requests have.
        max_model_len: most tokens of a request with its answer; None if the server does not say.
    """

    http: httpx2.AsyncClient
    path: str
    shared: dict[str, Any]
    max_model_len: int | None


@asynccontextmanager
async def connected(config: BenchConfig) -> AsyncIterator[Server]:
    """Yield the server that the options name. Raises ConfigError if it lists no model and none is named."""
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=api_address(config.base_url), headers=headers, timeout=config.timeout, limits=limits
    ) as http:
        model, longest = await _model(http, config.model)
        shared = {"model": model, "ignore_eos": True, "stream": True}
        shared |= {"stream_options": {"include_usage": True}}
        yield Server(http, "/chat/completions" if config.endpoint == "chat" else "/completions", shared, longest)


async def warm_up(server: Server, body: dict[str, Any], config: BenchConfig) -> None:
    """Send a request that does not count. Raises ConfigError if it fails."""
    warm = await send(server, body, RequestRecord(0.0), time.perf_counter())
    if warm.error is not None:
        raise ConfigError("base_url", config.base_url, f"failed the warm-up request: {warm.error}")


async def send[Record: RequestRecord](server: Server, body: dict[str, Any], record: Record, start: float) -> Record:
    """Send one request and fill in its record; times are in seconds since `start`."""
    try:
        async with server.http.stream("POST", server.path, json={**server.shared, **body}) as response:
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


async def _model(http: httpx2.AsyncClient, name: str | None) -> tuple[str, int | None]:
    """Return the named model, or else the first that the server lists; and its `max_model_len` if the list has it."""
    try:
        response = await http.get("/models")
        cards = response.raise_for_status().json()["data"]
        name = name or str(cards[0]["id"])
        return name, {card["id"]: card.get("max_model_len") for card in cards}.get(name)
    except (httpx2.HTTPError, LookupError, ValueError) as error:
        if name is not None:
            return name, None  # a server need not list its models
        limit = f"lists no model: {type(error).__name__}"
        if isinstance(error, httpx2.HTTPStatusError):
            limit = f"answers GET /models with status {error.response.status_code}"
        raise ConfigError("base_url", str(http.base_url), limit) from error


def _add_event(record: RequestRecord, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if text or delta.get("reasoning_content") or delta.get("reasoning"):
            record.chunks.append(now)
            record.completion_tokens += 1  # replaced by the server's own count if it sends one
            record.text += text  # without the reasoning, which clients do not send back
            break
    usage = event.get("usage")
    if usage:
        record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and not line.endswith("[DONE]"):
            yield json.loads(line[5:])
