"""What a chat shows before the first message: examples, the defaults of its parameters, and choices of reasoning.

GET /server_info has them as `chat`; the page at / asks for them.
"""

import re
from typing import Any

from starlette.requests import Request

from jswa.types import SamplingParams

from ..core.off_loop import made
from ..core.service import Service, service_of

_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
# A comparison of the variable with a list or a string. All repetitions are bounded: templates are untrusted.
_COMPARED = re.compile(
    r"""\breasoning_effort\b(?:\s*\|\s*\w{1,20}){0,3}\s*(?:==|!=|(?:not\s+)?in\b)\s*"""
    r"""(\[[^\]]{0,400}\]|\([^)]{0,400}\)|"[^"]{0,40}"|'[^']{0,40}')"""
)
_STRING = re.compile(r"""["']([\w.-]{1,40})["']""")
_SWITCH = re.compile(r"\benable_thinking\b|\bthinking is (?:not )?defined\b")


async def chat_hints(request: Request) -> dict[str, Any] | None:
    """Return what a chat shows of the model; None if the model has no chat template.

    The object has `examples`, the checkpoint's first messages to try; `sampling`, the parameters of a request that sets
    none, in which None is no limit and a random seed; `reasoning_efforts`, see `efforts`; and `images`, the most that a
    request may have, 0 if the model reads none.
    """
    service = service_of(request)
    if service.renderer is None or service.chat_template is None:
        return None
    template = "\n".join(service.chat_template.sources.values())
    return {
        "examples": list(service.chat_examples),
        "sampling": _defaults(service),
        "images": 0 if service.engine.images is None else service.config.max_images,
        "reasoning_efforts": await made(lambda: efforts(template), len(template), service.run_for(request)),
    }


def efforts(template: str) -> list[str] | None:
    """Return the values of `reasoning_effort` that a chat template tells apart; None if it takes any text.

    "none" is one if the template can be told to do without reasoning: the server then sets the template's switches.
    """
    lists = [_STRING.findall(choices) for choices in _COMPARED.findall(template)]
    found = dict.fromkeys(one for choices in lists for one in choices if one != "none")
    if not found and "reasoning_effort" in template:
        return None
    return [*(["none"] if _SWITCH.search(template) else ()), *found]


def _defaults(service: Service) -> dict[str, Any]:
    params = SamplingParams(**service.default_sampling)
    return {name: getattr(params, name) for name in _PARAMETERS}
