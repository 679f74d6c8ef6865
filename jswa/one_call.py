"""`jswa.generate(prompts)`: a model is loaded at its first use, and the last one stays loaded."""

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jswa.config import EngineConfig
from jswa.llm import LLM
from jswa.text.inputs import Prompts, engine_config
from jswa.types import RequestOutput, SamplingParams

_LOADING = threading.Lock()


def generate(
    prompts: Prompts,
    model: str | Path = "tiny",
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    stream: bool = False,
    use_tqdm: bool = True,
    lora: str | None = None,
    **options: Any,
) -> list[RequestOutput] | Iterator[RequestOutput]:
    """`LLM(model, …).generate(prompts, …)` in one call; the last model used stays loaded.

    `options` may name fields of `SamplingParams` and of `EngineConfig`; `seed` is the sampling seed.
    """
    sampling_names = {f.name for f in dataclasses.fields(SamplingParams)} | {"max_new_tokens"}
    engine_options = {name: value for name, value in options.items() if name not in sampling_names}
    sampling = {name: value for name, value in options.items() if name in sampling_names}
    with _LOADING:  # the cache would let several threads load the model at once
        llm = _loaded(str(model), engine_config(engine_options))
    if stream:
        return llm.generate(prompts, sampling_params, stream=True, lora=lora, **sampling)
    return llm.generate(prompts, sampling_params, stream=False, use_tqdm=use_tqdm, lora=lora, **sampling)


@lru_cache(maxsize=1)
def _loaded(model: str, options: EngineConfig) -> LLM:
    return LLM(model, **dataclasses.asdict(options))
