"""The routes of the server: each with its handler, whose key it needs, and which replicas it asks.

The application, the gate, the relay in front of replicas and the table in docs/serving.md are made from this list. A
route that is not here does not exist.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import PlainTextResponse

from ..api import admin
from ..api.anthropic import count_tokens, messages
from ..api.chat import chat_completions
from ..api.completions import completions
from ..api.embeddings import embeddings, pooling, score
from ..api.render import render_chat, render_completions
from ..api.responses import response, responses
from ..api.tokenize import detokenize, tokenize, tokenizer_info
from ..http.status import health, load, model, models, openapi, ready, version
from ..pages.files import PAGES, page
from ..pages.live import live_events
from .table import Route, Table

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def table(*, pages: bool) -> Table:
    """Return the table of a server's routes, with the pages or without them."""
    return Table((*ROUTES, *(_pages() if pages else ())))


def _answers(*statuses: int, events: str = "", text: bool = False) -> dict[str, Any]:
    """Return FastAPI's options for a route with these errors.

    Args:
        events: what the answer with status 200 is, if it may be a stream.
        text: whether the answer with status 200 is plain text.
    """
    answers: dict[int, Any] = {
        status: {"description": "error", "content": {"application/json": {"schema": _ERROR}}} for status in statuses
    }
    if events:
        answers[200] = {"description": events, "content": {"text/event-stream": {}}}
    return {"responses": answers, **({"response_class": PlainTextResponse} if text else {})}


_WORK = (400, 401, 404, 413, 429, 500, 503, 504)
_STREAM = _answers(*_WORK, events="the response, or a stream of its chunks")
_GENERATE = _answers(*_WORK)
_KEY = _answers(401)
_LOAD = (400, 401, 403, 404, 413, 500, 503)
_CHANGE: Mapping[str, Any] = _answers(400, 401, 403, 500, 503)
_GET, _POST = ("GET",), ("POST",)

ROUTES = (
    Route("/v1/completions", _POST, completions, "continue a prompt, or score it", options=_STREAM),
    Route("/v1/chat/completions", _POST, chat_completions, "answer a chat", options=_STREAM),
    Route(
        "/v1/responses", _POST, responses,
        "OpenAI's API for agents, with reasoning and tool calls ([answers.md](answers.md))", options=_STREAM,
    ),
    Route(
        "/v1/responses/{response_id:path}", ("GET", "DELETE"), response,
        "return or delete a response that is kept for `previous_response_id`",
        options=_answers(400, 401, 404, 500, 503),
    ),
    Route(
        "/v1/embeddings", _POST, embeddings, "embeddings of texts or token ids ([embeddings.md](embeddings.md))",
        options=_GENERATE,
    ),
    Route("/pooling", _POST, pooling, "the same with vLLM's `data`", options=_GENERATE),
    Route("/v1/score", _POST, score, "how alike texts are: the cosine of their embeddings", options=_GENERATE),
    Route("/score", _POST, score, "the same as `/v1/score`", options=_GENERATE),
    Route("/v1/messages", _POST, messages, "Anthropic's API for agents", options=_STREAM),
    Route("/v1/messages/count_tokens", _POST, count_tokens, "count the tokens of a prompt", options=_GENERATE),
    Route(
        "/v1/models", _GET, models, "the model, with `max_model_len`, and its adapters, with `parent`",
        options=_KEY,
    ),
    Route("/v1/models/{model:path}", _GET, model, "one of these models", options=_answers(400, 401, 404)),
    Route("/tokenize", _POST, tokenize, "`{prompt}` or `{messages}` to `{tokens}`, as in vLLM", options=_GENERATE),
    Route(
        "/v1/completions/render", _POST, render_completions,
        "`token_ids` of each prompt, for routers ([kv-events.md](kv-events.md))", options=_GENERATE,
    ),
    Route("/v1/chat/completions/render", _POST, render_chat, "the same of a chat", options=_GENERATE),
    Route("/detokenize", _POST, detokenize, "`{tokens}` to `{prompt}`", options=_GENERATE),
    Route("/tokenizer_info", _GET, tokenizer_info, "the tokenizer and the chat template", options=_answers(401, 404)),
    Route(
        "/metrics", ("GET", "HEAD"), admin.metrics, "Prometheus' metrics", whose="either", replicas="all",
        options=_answers(401, text=True),
    ),
    Route(
        "/server_info", _GET, admin.server_info, "version, options, kernels, load, and as `chat` what a chat shows",
        options=_KEY,
    ),
    Route(
        "/flush_cache", _POST, admin.flush_cache, "empty the prefix cache", whose="operator", replicas="all",
        options=_answers(401, 403, 500, 503),
    ),
    Route(
        "/abort", _POST, admin.abort, 'end requests: `{"request_id": …}` or `{"abort_all": true}`', whose="operator",
        replicas="all", options=_answers(400, 401, 403, 413, 500),
    ),
    Route(
        "/start_profile", _POST, admin.start_profile, "profile the device into the folder of `--profile-dir`",
        whose="operator", options=_CHANGE,
    ),
    Route("/stop_profile", _POST, admin.stop_profile, "end the profile", whose="operator", options=_CHANGE),
    Route(
        "/live/events", _GET, live_events,
        "the contents of the KV cache and their changes, as events of ids and counts, never of text", whose="operator",
        options=_answers(401, 403, 429, 500, events="events"),
    ),
    Route(
        "/v1/load_lora_adapter", _POST, admin.load_lora_adapter,
        '`{"lora_name": …, "lora_path": …}` loads an adapter from a folder of the server\'s machine '
        "([lora.md](lora.md))",
        whose="operator", replicas="none", options=_answers(*_LOAD, text=True),
    ),
    Route(
        "/v1/unload_lora_adapter", _POST, admin.unload_lora_adapter, '`{"lora_name": …}` unloads an adapter',
        whose="operator", replicas="none", options=_answers(*_LOAD, text=True),
    ),
    Route(
        "/update_weights_from_disk", _POST, admin.update_weights_from_disk,
        "new weights from a folder of the server's machine ([rl.md](rl.md#new-weights))", whose="operator",
        replicas="none", options=_answers(*_LOAD),
    ),
    Route(
        "/weight_version", _GET, admin.weight_version, "how often the weights were changed", whose="operator",
        replicas="none", options=_CHANGE,
    ),
    Route("/pause", _POST, admin.pause, "run no more steps", whose="operator", replicas="none", options=_CHANGE),
    Route("/resume", _POST, admin.resume, "run steps again", whose="operator", replicas="none", options=_CHANGE),
    Route(
        "/is_paused", _GET, admin.is_paused, "whether the engine is paused", whose="operator", replicas="none",
        options=_CHANGE,
    ),
    Route(
        "/sleep", _POST, admin.sleep, "free the KV cache, and with `?level=2` the weights too", whose="operator",
        replicas="none", options=_CHANGE,
    ),
    Route(
        "/wake_up", _POST, admin.wake_up, "allocate it again", whose="operator", replicas="none", options=_CHANGE
    ),
    Route(
        "/is_sleeping", _GET, admin.is_sleeping, "whether the engine sleeps", whose="operator", replicas="none",
        options=_CHANGE,
    ),
    Route("/health", _GET, health, "whether the engine runs", whose="nobody", replicas="all", options=_answers(503)),
    Route(
        "/ready", _GET, ready, "whether the server accepts requests", whose="nobody", replicas="all",
        options=_answers(503),
    ),
    Route(
        "/ping", _GET, health, "the same as `/health`, for Amazon SageMaker", whose="nobody", replicas="all",
        options=_answers(503),
    ),
    Route("/load", _GET, load, "`server_load`: how many requests are in progress", options=_KEY),
    Route("/version", _GET, version, "jswa's version", options=_KEY),
    Route("/openapi.json", _GET, openapi, "the OpenAPI description of this API", described=False),
)  # fmt: skip


def _pages() -> Iterator[Route]:
    told = {"/": "the chat page", "/live": "the page of the KV cache"}
    for path in PAGES:
        about = told.get(path, "files of the two pages")
        yield Route(path, ("GET", "HEAD"), page, about, whose="nobody", described=False)
