"""Prompts: checks of a body's `prompt`, and its tokens. Long texts are tokenized in threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.errors import RequestError
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput, placed
from jswa.text.guard import encode_guarded
from jswa.text.tokenizer import Tokenizer

from ..core.off_loop import Run, gathered, made
from ..http import limits
from ..http.errors import ApiError, invalid

NO_TOKENIZER = "the model has no tokenizer: send token ids"
TOO_LONG = "context_length_exceeded"  # the code of the error for a prompt that exceeds the context


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt. `text` is None if the request has sent token ids.

    Attributes:
        pictures: of the images whose soft tokens are among the ids, in their order.
    """

    text: str | None
    ids: Int[np.ndarray, " P"]
    pictures: Sequence[Picture] = ()


def split(prompt: Any, param: str = "prompt") -> list[str] | list[Int[np.ndarray, " P"]]:
    """Return a body's prompt as a list of texts or of arrays of token ids. `param`: its field. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, np.ndarray):
        return [token_ids(prompt, param)]
    if prompt is None:
        raise ApiError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    if not isinstance(prompt, list) or not prompt:
        raise invalid(param, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if isinstance(prompt[0], str | list | np.ndarray) and len(prompt) > limits.MAX_PROMPTS:
        raise invalid(param, f"has {len(prompt)} prompts, at most {limits.MAX_PROMPTS} are allowed")
    if isinstance(prompt[0], str):
        for index, one in enumerate(prompt):
            if not isinstance(one, str):
                raise invalid(f"{param}[{index}]", "must be a string, as the first prompt is")
        return prompt
    if isinstance(prompt[0], list | np.ndarray):
        return [token_ids(one, f"{param}[{index}]") for index, one in enumerate(prompt)]
    return [token_ids(prompt, param)]


def token_ids(value: Any, param: str) -> Int[np.ndarray, " P"]:
    """Return token ids as an array. The engine checks whether they are in the vocabulary. Raises ApiError.

    Args:
        value: a list, or the array [P] int64 that `bodies.parse` makes of a long one.
    """
    if isinstance(value, np.ndarray):
        wrong = np.flatnonzero((value < 0) | (value >= 2**31))
        if len(wrong):
            raise invalid(f"{param}[{wrong[0]}]", "must be a token id")
        return value.astype(np.int32)
    if not isinstance(value, list):
        raise invalid(param, "must be a list of token ids")
    if not value:
        return np.zeros(0, np.int32)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:
        first = next(n for n, item in enumerate(value) if type(item) is not int or not 0 <= item < 2**31)
        raise invalid(f"{param}[{first}]", "must be a token id")
    return np.array(value, np.int32)


async def split_off_loop(prompt: Any, run: Run, param: str = "prompt") -> list[str] | list[Int[np.ndarray, " P"]]:
    """Run `split`, in a thread if the prompts are long. Raises ApiError."""
    many = isinstance(prompt, list | np.ndarray)
    size = (
        sum(len(one) if isinstance(one, list | np.ndarray) else 1 for one in prompt[: limits.MAX_PROMPTS])
        if many
        else 0
    )
    return await made(partial(split, prompt, param), max(size, len(prompt)) if many else 0, run)


async def encode(
    texts: list[str],
    tokenizer: Tokenizer | None,
    run: Run,
    *,
    special: bool,
    longest: int | None,
    param: str = "prompt",
) -> list[Prompt]:
    """Tokenize texts. Raises ApiError.

    Args:
        run: runs long work in a thread.
        special: whether to add special tokens.
        longest: the model's context length in tokens: a text that has more characters than so many tokens can have is
            refused before it is tokenized. None: no text is refused, because the caller truncates its tokens.
        param: the field of the request that has the texts.
    """
    if tokenizer is None:
        raise invalid(param, NO_TOKENIZER)
    size = sum(map(len, texts))
    if longest is not None and max(map(len, texts)) > longest:
        await made(lambda: tokenizer.longest_token, size, run)  # the first call reads the whole vocabulary
        check_characters(texts, tokenizer, longest, param)
    work = (Prompt(text, tokenizer.encode(text, add_special_tokens=special)) for text in texts)
    try:
        return await gathered(work, size, run)
    except RequestError as error:
        raise ApiError.of(error) from error


async def encode_chat(text: str, tokenizer: Tokenizer, run: Run, *, special: bool, longest: int | None) -> Prompt:
    """Tokenize a rendered conversation, in which special tokens of users' texts are guarded. Arguments as `encode`.

    Raises ApiError.
    """
    if longest is not None and len(text) > longest:
        await made(lambda: tokenizer.longest_token, len(text), run)
        check_characters([text], tokenizer, longest)
    work = partial(encode_guarded, text, tokenizer, add_special_tokens=special)
    try:
        return Prompt(text, await made(work, len(text), run))
    except RequestError as error:
        raise ApiError.of(error) from error


def with_pictures(prompt: Prompt, pictures: Sequence[Picture], images: ImageInput) -> Prompt:
    """Return the prompt of a conversation with the tokens of its images. Raises ApiError if it has other images."""
    try:
        return Prompt(prompt.text, placed(prompt.ids, pictures, images.tokens, "messages"), pictures)
    except RequestError as error:
        raise invalid("messages", "the chat template does not show each image of the messages once") from error


def check_characters(texts: list[str], tokenizer: Tokenizer, longest: int, param: str = "prompt") -> None:
    """Refuse texts with so many characters that they must have more than `longest` tokens. Raises ApiError."""
    most = longest * tokenizer.longest_token
    for text in texts:
        if len(text) > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens, at most {most} characters. However, the "
                f"prompt has {len(text)} characters.",
                param=param,
                code=TOO_LONG,
            )


def truncated(prompt: Prompt, keep: int | None, longest: int) -> Prompt:
    """Return the prompt's last `keep` tokens; -1 keeps as many as the context has room for. Raises ApiError."""
    keep = longest - 1 if keep == -1 else keep
    if keep is None or len(prompt.ids) <= keep:
        return prompt
    if keep == 0:
        raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")
    return Prompt(None, prompt.ids[-keep:])


def check_length(prompt: Prompt, max_tokens: int | None, longest: int) -> None:
    """Refuse a prompt that does not fit the context together with `max_tokens`. Raises ApiError."""
    asked = max(max_tokens or 1, 1)
    if len(prompt.ids) + asked <= longest:
        return
    raise ApiError(
        400,
        f"This model's maximum context length is {longest} tokens. However, you requested {len(prompt.ids) + asked} "
        f"tokens ({len(prompt.ids)} in the prompt, {asked} in the completion).",
        param="prompt" if len(prompt.ids) + 1 > longest else "max_tokens",
        code=TOO_LONG,
    )
