"""The routes POST /tokenize and /detokenize and GET /tokenizer_info, as in vLLM; evaluation tools use them."""

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jswa.images.tokens import shown
from jswa.text.tokenizer import Tokenizer

from ..core.off_loop import gathered, made
from ..core.service import Service, key_of, service_of
from ..http import limits
from ..http.errors import ApiError, invalid
from ..http.pieces import encode as encode_json
from ..http.pieces import listed, with_fields
from ..http.sse import JsonResponse, unless_gone
from ..media.album import Album
from ..text.messages import chat_prompt, chat_request
from ..text.prompts import NO_TOKENIZER, encode, token_ids
from .schemas import Body, Message, TokensField

_CHARACTERS = 4  # characters of a token in usual text
_PIECE = 4_096  # tokens that are encoded as JSON at a time


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt or messages."""

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    tools: Any = None
    tool_choice: Any = None
    documents: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    tokens: TokensField


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a prompt or of a conversation. Raises ApiError unless there is exactly one of the two."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = _tokenizer(service, "prompt")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "set either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        async with service.held(request, len(body.prompt) // _CHARACTERS):
            run = service.run_for(request)
            work = encode([body.prompt], tokenizer, run, special=special, longest=service.max_model_len)
            prompts = await unless_gone(request.receive, work)
    else:
        chat = chat_request(body.model_dump(exclude={"prompt", "return_token_strs"}))
        async with Album(service, key_of(request)) as album:
            prompts = [await chat_prompt(chat, album)]
    if prompts is None:
        return Response(status_code=499)
    images = service.engine.images
    ids = shown(prompts[0].ids, None if images is None else images.tokens)
    fields = {"tokens": await ids_in_json(ids)}
    if body.return_token_strs:
        fields["token_strs"] = listed(await gathered(([part] for part in _strings(ids, tokenizer)), len(ids)))
    found = {"count": len(ids), "max_model_len": service.max_model_len}
    return service.answer(request, with_fields(found, fields))


async def ids_in_json(ids: Int[np.ndarray, " T"]) -> list[bytes]:
    """Return a list of token ids in JSON, in pieces."""
    return listed(await gathered(([part] for part in _numbers(ids)), len(ids)))


def _numbers(ids: Int[np.ndarray, " T"]) -> Iterator[bytes]:
    for start in range(0, len(ids), _PIECE):
        yield encode_json(ids[start : start + _PIECE].tolist())[1:-1]


def _strings(ids: Int[np.ndarray, " T"], tokenizer: Tokenizer) -> Iterator[bytes]:
    for start in range(0, len(ids), _PIECE):
        part = ids[start : start + _PIECE].tolist()
        yield encode_json([tokenizer.backend.id_to_token(token) for token in part])[1:-1]


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, including special tokens. Raises ApiError for anything but a list of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = _tokenizer(service, "tokens")
    if not isinstance(body.tokens, list | np.ndarray) or len(body.tokens) > limits.MAX_DETOKENIZED:
        raise invalid("tokens", f"must be a list of at most {limits.MAX_DETOKENIZED} token ids")

    def work() -> str:
        ids = token_ids(body.tokens, "tokens")
        if len(ids) and ids.max() >= tokenizer.vocab_size:
            raise invalid("tokens", f"must be in [0, {tokenizer.vocab_size})")
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    async with service.held(request, len(body.tokens)):
        return JsonResponse({"prompt": await made(work, len(body.tokens), service.run_for(request))})


async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens, the chat template and the sizes of the model. Raises ApiError without a tokenizer."""
    service = service_of(request)
    if service.tokenizer is None:
        raise ApiError(404, NO_TOKENIZER, code="not_found")
    named = dict(service.tokenizer.special.named)
    template = service.chat_template
    found = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return JsonResponse(
        {
            **named,
            **found,
            "chat_template": None if template is None else template.sources.get("default"),
            "vocab_size": service.tokenizer.vocab_size,
            "model_max_length": service.max_model_len,
        }
    )


def _tokenizer(service: Service, param: str) -> Tokenizer:
    if service.tokenizer is None:
        raise invalid(param, NO_TOKENIZER)
    return service.tokenizer
