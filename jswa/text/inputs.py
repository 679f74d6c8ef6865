"""What callers may pass, turned into what the engine takes: prompts, sampling keywords, engine options."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
from jaxtyping import Int

from jswa.config import EngineConfig
from jswa.errors import CheckpointError, ConfigError, InvalidPrompt, InvalidSampling, InvalidToken
from jswa.text.special_tokens import read_optional
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

Prompt = str | Sequence[int] | Int[np.ndarray, " P"] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
# Keys of generation_config.json, and what SamplingParams calls them.
_DEFAULTS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_DEFAULTS["max_new_tokens"] = "max_tokens"
NO_TOKENIZER = (
    "is text, but the checkpoint has no tokenizer.json: give token ids, or make one with "
    "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from options by name. Raises ConfigError for a name that does not exist, with the nearest one."""
    names = [f.name for f in dataclasses.fields(EngineConfig)]
    for name, value in options.items():
        if name not in names:
            raise ConfigError(name, value, f"is not an option; {_nearest(name, names)}")
    modules = options.get("lora_modules", ())
    if isinstance(modules, Mapping):
        modules = [f"{name}={folder}" for name, folder in modules.items()]
    elif not isinstance(modules, Sequence) or isinstance(modules, str):
        modules = [modules]
    return EngineConfig(**{**options, "lora_modules": tuple(modules)})


def default_sampling(folder: Path) -> dict[str, Any]:
    """Sampling that a checkpoint's generation_config.json asks for, as keywords.

    As in vLLM, `do_sample` counts for nothing: a checkpoint is greedy where its temperature is 0. Null is absent.
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


def sampling_params(keywords: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from keywords; `max_new_tokens` is `max_tokens`. Raises InvalidSampling for unknown names."""
    given = dict(keywords)
    if "max_new_tokens" in given:
        if "max_tokens" in given:
            raise InvalidSampling("max_new_tokens", given["max_new_tokens"], "is another name of max_tokens; give one")
        given["max_tokens"] = given.pop("max_new_tokens")
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    for name, value in given.items():
        if name not in names:
            raise InvalidSampling(name, value, f"is not a sampling parameter of this version; {_nearest(name, names)}")
    return SamplingParams(**given)


def params_of(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    keywords: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> list[SamplingParams]:
    """One SamplingParams per prompt; `defaults` (the checkpoint's) stand behind keywords, not behind SamplingParams.

    Raises InvalidSampling where there are too many, too few, or both forms.
    """
    if params is not None and keywords:
        raise InvalidSampling("sampling_params", params, f"give it or keywords ({', '.join(keywords)}), not both")
    if params is None:
        if "max_new_tokens" in keywords:  # the other name of max_tokens, which a default must not clash with
            defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return [sampling_params({**defaults, **keywords})] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidSampling("sampling_params", params, "must be a SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InvalidSampling("sampling_params", f"{len(params)} items", f"must be one, or {len(prompts)}")
    return list(params)


def split_prompts(prompts: Prompts) -> list[Any]:
    """One prompt or a list of them, as a list; what its items are is `tokenize`'s concern."""
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    # A list of numbers is one prompt, also one that starts or ends in something that is no number.
    return [items] if not items or any(_is_number(item) for item in items) else items


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Int[np.ndarray, " P"]]:
    """Text, where the prompt is text, and token ids of one prompt. Raises InvalidPrompt or InvalidToken."""
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
    """The cache salt of one prompt: its own, or that of the call. Raises InvalidPrompt."""
    salt = prompt.get("cache_salt", default) if isinstance(prompt, Mapping) else default
    if not isinstance(salt, str):
        raise InvalidPrompt("cache_salt", salt, "must be a string")
    return salt


def adapter_of(prompt: Prompt, default: str | None) -> str | None:
    """The name of one prompt's LoRA adapter: its own, or that of the call. Raises InvalidPrompt.

    Whether it exists is the engine's to say.
    """
    name = prompt.get("lora", default) if isinstance(prompt, Mapping) else default
    if name is not None and not isinstance(name, str):
        raise InvalidPrompt("lora", name, "must be a string")
    return name


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words that must not be generated, at the start of a word and within one."""
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
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        _refuse(value)
    for item in items:
        if not _is_number(item) or isinstance(item, bool | float | np.floating):
            _refuse(value)
        if not 0 <= item < 2**31:
            raise InvalidToken("prompt token id", item, "must be in the vocabulary")
    return np.array(items, np.int32)


def _refuse(prompt: object) -> Never:
    raise InvalidPrompt("prompt", prompt, "must be a string or a list of token ids")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
