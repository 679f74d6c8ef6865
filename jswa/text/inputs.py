"""Check and convert what callers of `LLM` pass: prompts, sampling parameters and engine options."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
from jaxtyping import Int

from jswa.config import EngineConfig
from jswa.errors import CheckpointError, ConfigError, InvalidPrompt, InvalidSampling, InvalidToken
from jswa.kernels import instead_of
from jswa.options.json_text import JSON_OPTIONS, option_text
from jswa.storage.json_object import read_optional, shown
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

Prompt = str | Sequence[int] | Int[np.ndarray, " P"] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
# Keys of generation_config.json and their names in SamplingParams.
_DEFAULTS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_DEFAULTS["max_new_tokens"] = "max_tokens"
MOST_EXAMPLES, MOST_EXAMPLE_CHARS = 8, 500  # of chat_examples.json
NO_TOKENIZER = (
    "is text, but the checkpoint has no tokenizer.json: pass token ids, or create the file with "
    "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Make an EngineConfig from options by name. Raises ConfigError for an unknown name, with the nearest."""
    names = [f.name for f in dataclasses.fields(EngineConfig)]
    for name, value in options.items():
        if name not in names:
            raise ConfigError(name, value, f"is not an option; {_nearest(name, names)}")
    modules = options.get("lora_modules", ())
    if isinstance(modules, Mapping):
        modules = [f"{name}={folder}" for name, folder in modules.items()]
    elif not isinstance(modules, Sequence) or isinstance(modules, str):
        modules = [modules]
    sizes = options.get("cudagraph_capture_sizes", ())
    if isinstance(sizes, Sequence) and not isinstance(sizes, str):
        sizes = tuple(sizes)
    given = {"lora_modules": tuple(modules), "cudagraph_capture_sizes": sizes}
    given |= {name: option_text(name, options.get(name)) for name in JSON_OPTIONS}
    return EngineConfig(**{**options, **given})


def default_sampling(folder: Path) -> dict[str, Any]:
    """Return the default sampling parameters of a checkpoint's generation_config.json, as keywords.

    As in vLLM, `do_sample` is ignored: only temperature 0 makes a checkpoint greedy. A null value counts as absent.
    Raises CheckpointError for a value that SamplingParams would refuse.
    """
    path = folder / "generation_config.json"
    config = read_optional(path)
    found = {}
    for key, name in _DEFAULTS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidSampling as error:
            raise CheckpointError(f"{path}: {key} = {value!r:.80}: {error.limit}") from error
        found[name] = value
    return found


def chat_examples(folder: Path) -> tuple[str, ...]:
    """Return first messages to try a checkpoint with: `messages` of its chat_examples.json, or none without that file.

    Raises CheckpointError unless they are at most MOST_EXAMPLES strings of 1 to MOST_EXAMPLE_CHARS characters.
    """
    path = folder / "chat_examples.json"
    found = read_optional(path).get("messages", [])
    if not isinstance(found, list) or len(found) > MOST_EXAMPLES or not all(map(_is_example, found)):
        limit = f"must be a list of at most {MOST_EXAMPLES} strings of 1 to {MOST_EXAMPLE_CHARS} characters"
        raise CheckpointError(f"{path}: messages = {shown(found)}: {limit}")
    return tuple(found)


def _is_example(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value.strip()) <= len(value) <= MOST_EXAMPLE_CHARS


def sampling_params(keywords: Mapping[str, Any]) -> SamplingParams:
    """Make SamplingParams from keywords; `max_new_tokens` means `max_tokens`. Raises InvalidSampling."""
    given = dict(keywords)
    if "max_new_tokens" in given:
        if "max_tokens" in given:
            raise InvalidSampling(
                "max_new_tokens", given["max_new_tokens"], "is another name of max_tokens; pass only one of them"
            )
        given["max_tokens"] = given.pop("max_new_tokens")
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    for name, value in given.items():
        if name not in names:
            raise InvalidSampling(name, value, f"is not a sampling parameter; {_nearest(name, names)}")
    return SamplingParams(**given)


def params_of(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    keywords: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt.

    `defaults`, the checkpoint's, fill in what `keywords` leave out; a SamplingParams object is used as it is. Raises
    InvalidSampling if the numbers of prompts and params differ, or if both params and keywords are given.
    """
    if params is not None and keywords:
        raise InvalidSampling(
            "sampling_params", params, f"pass either it or keywords ({', '.join(keywords)}), not both"
        )
    if params is None:
        if "max_new_tokens" in keywords:  # the other name of max_tokens: drop its default
            defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return [sampling_params({**defaults, **keywords})] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidSampling("sampling_params", params, "must be a SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InvalidSampling(
            "sampling_params", f"{len(params)} items", f"must be one, or one per prompt: {len(prompts)}"
        )
    return list(params)


def split_prompts(prompts: Prompts) -> list[Any]:
    """Return one prompt or several prompts as a list. The items are not checked here; `tokenize` does that."""
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    # A list with numbers in it is one prompt, even if other items of it are not numbers: `tokenize` refuses those.
    return [items] if not items or any(_is_number(item) for item in items) else items


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Int[np.ndarray, " P"]]:
    """Return the text of one prompt, or None if it is token ids, and its ids [P]. Raises RequestError."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            return text if isinstance(text, str) else None, _ids(prompt["prompt_token_ids"])
        prompt = prompt.get("prompt", prompt)
    if not isinstance(prompt, str):
        return None, _ids(prompt)
    if not prompt:
        raise InvalidPrompt("prompt", prompt, "must not be empty")
    if tokenizer is None:
        raise InvalidPrompt("prompt", prompt, NO_TOKENIZER)
    return prompt, tokenizer.encode(prompt)


def salt_of(prompt: Prompt, default: str) -> str:
    """Return the cache salt of one prompt: its own, or else the call's. Raises InvalidPrompt."""
    salt = prompt.get("cache_salt", default) if isinstance(prompt, Mapping) else default
    if not isinstance(salt, str):
        raise InvalidPrompt("cache_salt", salt, "must be a string")
    return salt


def adapter_of(prompt: Prompt, default: str | None) -> str | None:
    """Return the name of one prompt's LoRA adapter: its own, or else the call's. Raises InvalidPrompt.

    The engine checks that the adapter exists.
    """
    name = prompt.get("lora", default) if isinstance(prompt, Mapping) else default
    if name is not None and not isinstance(name, str):
        raise InvalidPrompt("lora", name, "must be a string")
    return name


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words that must not be generated, each with and without a space before it.

    Raises InvalidSampling if there are words and no tokenizer.
    """
    if words and tokenizer is None:
        raise InvalidSampling("bad_words", list(words), "are text, but the checkpoint has no tokenizer.json")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).tolist()) if tokenizer is not None else ()
            if ids:
                found[ids] = None
    return tuple(found)


def _ids(value: object) -> Int[np.ndarray, " P"]:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return _in_range(value)
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(items, list | tuple) and set(map(type, items)) <= {int}:
        with contextlib.suppress(OverflowError):  # the loop names the number
            return _in_range(np.array(items, np.int64))
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        _refuse(value)
    for item in items:
        if not _is_number(item) or isinstance(item, bool | float | np.floating):
            _refuse(value)
        if not 0 <= item < 2**31:
            raise InvalidToken("prompt token id", int(item), "must be in the vocabulary")
    return np.array(items, np.int32)


def _in_range(ids: Int[np.ndarray, " P"]) -> Int[np.ndarray, " P"]:
    """Return integers as token ids. Raises InvalidToken for one that no vocabulary has."""
    wrong = np.flatnonzero((ids < 0) | (ids >= 2**31))
    if len(wrong):
        raise InvalidToken("prompt token id", int(ids[wrong[0]]), "must be in the vocabulary")
    return ids.astype(np.int32)


def _refuse(prompt: object) -> Never:
    raise InvalidPrompt("prompt", prompt, "must be a string or a list of token ids")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _nearest(name: str, names: list[str]) -> str:
    if (newer := instead_of(name)) is not None:
        return f"it is now {newer}"
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"the known names are {', '.join(names)}"
