"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's, which evaluation tools use."""

from typing import Annotated, Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from jswa.text.tokenizer import Tokenizer

from ..core.service import Service, key_of, service_of
from ..http import limits
from ..http.errors import ApiError, from_validation, invalid
from ..http.sse import JsonResponse
from ..text.messages import chat_prompt
from ..text.prompts import NO_TOKENIZER, encode, token_ids
from .schemas import Body, ChatRequest, Message

_FEW = 4_096  # tokens that are decoded on the event loop


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages."""

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=limits.MAX_MESSAGES)] | None = None
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
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    tokens: Annotated[list[Any], Field(max_length=limits.MAX_DETOKENIZED)]


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a prompt, or of a conversation's."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = _tokenizer(service, "prompt")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give prompt or messages, one of them")
    if body.prompt is not None:
        (prompt,) = await encode(
            [body.prompt], tokenizer, service.helpers, key_of(request), special=body.add_special_tokens is not False
        )
    else:
        shared = body.model_dump(exclude={"prompt", "return_token_strs"})
        try:
            chat = ChatRequest(**shared)
        except ValidationError as error:
            raise from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error
        prompt = await chat_prompt(service, chat, key_of(request))
    ids = prompt.ids.tolist()
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.backend.id_to_token(token) for token in ids]
    return service.answer(request, found)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, special ones included."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = _tokenizer(service, "tokens")

    def work() -> str:
        ids = token_ids(body.tokens, "tokens")
        if len(ids) and ids.max() >= tokenizer.vocab_size:
            raise invalid("tokens", f"must be in [0, {tokenizer.vocab_size})")
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    few = len(body.tokens) <= _FEW
    return JsonResponse({"prompt": work() if few else await service.helpers.run(key_of(request), work)})


async def tokenizer_info(request: Request) -> Response:
    """Special tokens and the chat template."""
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
