"""The routes POST /v1/embeddings, /pooling and /v1/score, as in vLLM: the pooled hidden states of prompts."""

import base64
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from starlette.requests import Request
from starlette.responses import Response

from jswa.errors import RequestError
from jswa.text.pooling import PoolingConfig, pairs, similarity

from ..core.off_loop import Run, gathered
from ..core.request import Job
from ..core.service import Service, service_of
from ..http.errors import ApiError, engine_errors, invalid, unsupported
from ..http.pieces import encode as encode_json
from ..http.pieces import listed, with_fields
from ..http.sse import unless_gone
from ..text.prompts import TOO_LONG, Prompt, encode, split_off_loop
from .schemas import EmbeddingRequest, Pooled, PoolingRequest, ScoreRequest

Vector = Float[np.ndarray, " M"]
_MOST_UNKNOWN = 256  # fields of one request that are checked for unknown names
_HARMLESS = ("user", "mm_processor_kwargs", "media_io_kwargs")
_REFUSED = {
    "messages": "is not supported: send the text as input",
    "normalize": "is not supported: use use_activation",
    "top_n": "is not supported",
    "softmax": "is not supported",
    "activation": "is not supported",
}
_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return the embedding of each input. Raises ApiError if the request is refused."""
    return await _vectors(body, request, "embd", {"object": "embedding"}, "embedding")


async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Return the embedding of each input as `data`. Raises ApiError if the request is refused."""
    if body.dimensions is not None:
        raise unsupported("dimensions", "is not supported by /pooling: use /v1/embeddings")
    return await _vectors(body, request, "pooling", {"object": "pooling"}, "data")


async def score(body: ScoreRequest, request: Request) -> Response:
    """Return the cosine of the embeddings of pairs of texts. Raises ApiError if the request is refused."""
    service, run = service_of(request), service_of(request).run_for(request)
    model = _check(service, body)
    if body.use_activation is False:
        raise unsupported(
            "use_activation", "must be left out or true: a cosine does not depend on the vectors' lengths"
        )
    names = [pair for pair in _NAMES if all(getattr(body, name) is not None for name in pair)]
    given = [name for name in dict.fromkeys(itertools.chain.from_iterable(_NAMES)) if getattr(body, name) is not None]
    if len(names) != 1 or len(given) != 2:
        raise invalid(given[0] if given else "text_1", "send text_1 and text_2, or another pair of names")
    sides = [await _texts(getattr(body, name), name, run) for name in names[0]]
    with engine_errors():
        compared = pairs(*map(len, sides))
        params = service.pooling.params()

    async def begun() -> Job:
        prompts = [await _prompts(service, body, side, name, run) for side, name in zip(sides, names[0], strict=True)]
        return await service.start(request, body, [*prompts[0], *prompts[1]], params, _name(body, request))

    def items(found: list[Vector]) -> Iterator[bytes]:
        for index, (one, other) in enumerate(compared):
            cosine = similarity(found[one], found[len(sides[0]) + other])
            yield encode_json({"index": index, "object": "score", "score": cosine})

    return await _answered(service, body, request, begun, items, f"score-{_name(body, request)}", model)


async def _vectors(body: EmbeddingRequest, request: Request, kind: str, item: dict[str, Any], field: str) -> Response:
    """Return the vectors of a request's inputs.

    Args:
        kind: with which the answer's id begins.
        item: what each item of the answer has besides its index, and the vector as `field`.
    """
    service, run = service_of(request), service_of(request).run_for(request)
    model, config = _check(service, body), service.pooling
    with engine_errors():
        params = config.params(body.dimensions)

    async def begun() -> Job:
        parts = await split_off_loop(body.input, run, "input")
        prompts = await _prompts(service, body, parts, "input", run)
        return await service.start(request, body, prompts, params, _name(body, request))

    def items(found: list[Vector]) -> Iterator[bytes]:
        for index, pooled in enumerate(found):
            yield encode_json({"index": index, **item, field: _written(config, body, pooled)})

    return await _answered(service, body, request, begun, items, f"{kind}-{_name(body, request)}", model)


def _written(config: PoolingConfig, body: EmbeddingRequest, pooled: Vector) -> list[float] | str:
    """Return a vector as the request asks for it."""
    vector = config.embedding(pooled, body.dimensions, body.use_activation)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _check(service: Service, body: Pooled) -> str:
    """Return the model's name for the answer. Raises ApiError for a field that is not supported."""
    if body.stream:
        raise unsupported("stream", "is not supported: an embedding comes whole")
    extra = body.model_extra or {}
    for name, why in _REFUSED.items():
        if extra.get(name) is not None:
            raise unsupported(name, why)
    if extra.get("padding") not in (None, "do_not_pad"):
        raise unsupported("padding", "must be do_not_pad")
    known = {*_HARMLESS, *_REFUSED, "padding"}
    service.count_unknown([name for name in itertools.islice(extra, _MOST_UNKNOWN) if name not in known])
    return service.check_model(body.model)


def _name(body: Pooled, request: Request) -> str:
    return body.request_id or request.scope["jswa.request_id"]


async def _texts(value: Any, param: str, run: Run) -> list[str]:
    """Return one side of a score as texts. Raises ApiError."""
    parts = await split_off_loop(value, run, param)
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise invalid(param, "must be a string or a list of strings")
    return texts


async def _prompts(service: Service, body: Pooled, parts: list[Any], param: str, run: Run) -> list[Prompt]:
    """Return the tokens of a field's texts, or its token ids, cut as the request asks. Raises ApiError."""
    longest, keep, last = service.max_model_len - 1, body.truncate_prompt_tokens, body.truncation_side == "left"
    keep = longest if keep == -1 else keep
    if keep == 0:
        raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")
    texts = [part for part in parts if isinstance(part, str)]
    special = body.add_special_tokens is not False
    prompts = [Prompt(None, part) for part in parts if not isinstance(part, str)]
    if texts:
        most = service.max_model_len if keep is None else None
        prompts = await encode(texts, service.tokenizer, run, special=special, longest=most, param=param)
    for index, prompt in enumerate(prompts):
        if keep is not None and len(prompt.ids) > keep:
            tokenizer = service.tokenizer if prompt.text is not None and special else None
            if tokenizer is not None:
                ids = tokenizer.cut(prompt.ids, keep, keep_last=last)
            else:
                ids = prompt.ids[-keep:] if last else prompt.ids[:keep]
            prompts[index] = Prompt(None, ids)
        _check_length(prompts[index], param if len(prompts) == 1 else f"{param}[{index}]", longest)
    return prompts


def _check_length(prompt: Prompt, param: str, longest: int) -> None:
    if not len(prompt.ids):
        raise invalid(param, "must have at least one token")
    if len(prompt.ids) > longest:
        message = f"{param}: has {len(prompt.ids)} tokens: at most {longest} fit; truncate_prompt_tokens cuts it"
        raise ApiError(400, message, param=param, code=TOO_LONG)


async def _answered(
    service: Service,
    body: Pooled,
    request: Request,
    begun: Callable[[], Coroutine[Any, Any, Job]],
    items: Callable[[list[Vector]], Iterator[bytes]],
    name: str,
    model: str,
) -> Response:
    """Run a request and return its answer.

    Args:
        begun: queues its prompts.
        items: yields the items of the answer in JSON, given the pooled hidden states of all prompts.
        name: the id of the answer.
    """
    job = await unless_gone(request.receive, begun())
    if job is None:
        return Response(status_code=499)
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}

    async def whole() -> list[bytes]:
        found = await _pooled(job)
        size = sum(map(len, found))
        try:
            data = await gathered(items(found), size, service.run_for(request))
        except RequestError as error:
            raise ApiError.of(error) from error
        return with_fields({**head, "usage": _usage(job)}, {"data": listed([part] for part in data)})

    return await service.respond(request, job, _name(body, request), stream=None, whole=whole)


async def _pooled(job: Job) -> list[Vector]:
    """Return the pooled hidden state of each prompt. Raises ApiError, also if the request is aborted."""
    found: dict[int, Vector] = {}
    async for delta in job.deltas():
        if delta.pooled is None:
            raise ApiError(503, "the request was aborted", code="aborted")
        found[delta.text.index] = delta.pooled
    return [found[index] for index in sorted(found)]


def _usage(job: Job) -> dict[str, Any]:
    details = {"cached_tokens": job.cached_tokens, "missed_tokens": dict(job.missed_tokens)}
    tokens = job.prompt_tokens
    return {
        "prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": details,
    }  # fmt: skip
