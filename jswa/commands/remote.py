"""A running server as `jswa chat --url` and `jswa generate --url` ask it: any that speaks OpenAI's API."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple

from jswa.commands.options.address import api_address
from jswa.commands.options.named_model import asked
from jswa.errors import RemoteError
from jswa.types import AnswerEvent, SamplingParams

_SECONDS = 600  # between two events of a stream


class AnswerPiece(NamedTuple):
    """A piece of an answer; `calls` are those of tools. The counts of tokens come with the last one."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning: str = ""
    calls: Sequence[AnswerEvent] = ()
    completion_tokens: int = 0


def served_models(url: str) -> list[str]:
    """Return the names of the models that a server lists. Raises RemoteError."""
    with _asked(url, "/models") as answer:
        found = json.loads(answer.read())
    try:
        names = [str(model["id"]) for model in found["data"]]
    except (KeyError, TypeError) as error:
        raise RemoteError(f"{api_address(url)}/models lists no model") from error
    if not names:
        raise RemoteError(f"{api_address(url)}/models lists no model")
    return names


def asked_at(url: str, words: Sequence[str], model: str | None) -> tuple[str, Sequence[str]]:
    """Return the model of a server to ask, by default its first, and the words that are texts for it.

    Raises ConfigError, RemoteError.
    """
    if model is not None:
        return model, words
    served = served_models(url)
    named, texts = asked(words, None, served)
    return named or served[0], texts


def complete(url: str, model: str, prompt: str, params: SamplingParams) -> Iterator[AnswerPiece]:
    """Yield the pieces of a prompt's continuation. Raises RemoteError."""
    return _events(url, "/completions", {"model": model, "prompt": prompt, **_sampling(params)})


def answer(
    url: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Iterator[AnswerPiece]:
    """Yield the pieces of the answer to a conversation; to close the iterator closes the connection.

    Args:
        sampling: fields of the request; the server has defaults for the others.

    Raises RemoteError.
    """
    body = {"model": model, "messages": list(messages), **sampling}
    return _events(url, "/chat/completions", {**body, "tools": list(tools)} if tools else body)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request; those that only some servers know are left out where they are neutral."""
    found: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
    if params.top_k:
        found["top_k"] = params.top_k
    if params.ignore_eos:
        found["ignore_eos"] = True
    return found


def _events(url: str, path: str, body: dict[str, Any]) -> Iterator[AnswerPiece]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with _asked(url, path, asked) as lines:
        try:
            for line in lines:
                data = line.decode().strip().removeprefix("data:").strip()
                if line.startswith(b"data:") and data != "[DONE]":
                    yield _event(json.loads(data))
        except (OSError, ValueError, HTTPException) as error:
            raise RemoteError(
                f"{api_address(url)}{path}: the stream broke off ({type(error).__name__}: {error})"
            ) from error


def _event(found: dict[str, Any]) -> AnswerPiece:
    if "error" in found:
        raise RemoteError(_message(found))
    usage = found.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choice = (found.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    text, reasoning = (
        choice.get("text") or delta.get("content"),
        delta.get("reasoning_content") or delta.get("reasoning"),
    )
    calls = list(_calls(delta.get("tool_calls") or []))
    asked, told = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return AnswerPiece(text or "", choice.get("finish_reason"), asked, cached, reasoning or "", calls, told)


def _calls(deltas: list[dict[str, Any]]) -> Iterator[AnswerEvent]:
    for delta in deltas:
        function, index = delta.get("function") or {}, delta.get("index") or 0
        if function.get("name"):
            yield AnswerEvent("call", function["name"], index)
        if function.get("arguments"):
            yield AnswerEvent("arguments", function["arguments"], index)


def _asked(url: str, path: str, body: Any = None) -> Any:
    """Send a request, with OPENAI_API_KEY if that is set, and return the open answer."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    if not url.startswith(("http://", "https://")):
        raise RemoteError(f"url = {url!r}: must begin with http:// or https://")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{api_address(url)}{path}", data, headers)  # noqa: S310 - http(s) only
    try:
        return urllib.request.urlopen(request, timeout=_SECONDS)  # noqa: S310
    except urllib.error.HTTPError as error:
        raise RemoteError(f"{request.full_url} answers with status {error.code}: {_reason(error)}") from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RemoteError(f"{request.full_url} cannot be reached: {reason}; is the server running?") from error


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(65_536)
    try:
        return _message(json.loads(text))
    except (ValueError, AttributeError):
        return " ".join(text.decode(errors="replace").split())[:200] or str(error.reason)


def _message(found: dict[str, Any]) -> str:
    error = found.get("error") or found.get("detail") or found
    return str(error.get("message") if isinstance(error, dict) else error)[:300]
