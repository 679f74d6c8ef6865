"""jswa: an LLM serving engine in JAX for models that mix sliding-window and full attention.

    import jswa
    jswa.generate("Once upon a time", max_tokens=50)
    llm = jswa.LLM("path/to/checkpoint", max_model_len=8192)
    llm.generate(["a", "b"], jswa.SamplingParams(temperature=0, max_tokens=16))

`jswa.AsyncLLM` is the same on an event loop. Importing jswa imports no jax; the first use of `LLM`, `AsyncLLM` or
`generate` does.

Shape letters, in every annotation: T tokens of a step (ragged, padded), R rows, H query heads, K KV heads, D head
size, V value head size or vocabulary, M model width, N pages per row, P pages, S layers of a page, p tokens per page.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jswa.version import __version__ as __version__

if TYPE_CHECKING:
    from jswa.async_llm import AsyncLLM as AsyncLLM
    from jswa.config import EngineConfig as EngineConfig
    from jswa.errors import CacheFileError as CacheFileError
    from jswa.errors import CheckpointError as CheckpointError
    from jswa.errors import ConfigError as ConfigError
    from jswa.errors import EngineDead as EngineDead
    from jswa.errors import EngineError as EngineError
    from jswa.errors import FieldError as FieldError
    from jswa.errors import FormTooLarge as FormTooLarge
    from jswa.errors import GenerationError as GenerationError
    from jswa.errors import HostLost as HostLost
    from jswa.errors import InternalError as InternalError
    from jswa.errors import InvalidPrompt as InvalidPrompt
    from jswa.errors import InvalidSampling as InvalidSampling
    from jswa.errors import InvalidToken as InvalidToken
    from jswa.errors import JswaError as JswaError
    from jswa.errors import ModelError as ModelError
    from jswa.errors import NothingAllowed as NothingAllowed
    from jswa.errors import PromptTooLong as PromptTooLong
    from jswa.errors import RequestError as RequestError
    from jswa.errors import TaskSetError as TaskSetError
    from jswa.errors import UnsupportedModel as UnsupportedModel
    from jswa.errors import WeightsError as WeightsError
    from jswa.frontend.pooled_call import EmbeddingRequestOutput as EmbeddingRequestOutput
    from jswa.frontend.pooled_call import ScoringRequestOutput as ScoringRequestOutput
    from jswa.llm import LLM as LLM
    from jswa.one_call import generate as generate
    from jswa.types import CompletionOutput as CompletionOutput
    from jswa.types import RequestOutput as RequestOutput
    from jswa.types import SamplingParams as SamplingParams
    from jswa.types import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "jswa.async_llm": ("AsyncLLM",),
    "jswa.config": ("EngineConfig",),
    "jswa.errors": (
        "CacheFileError",
        "CheckpointError",
        "ConfigError",
        "EngineDead",
        "EngineError",
        "FieldError",
        "FormTooLarge",
        "GenerationError",
        "HostLost",
        "InternalError",
        "InvalidPrompt",
        "InvalidSampling",
        "InvalidToken",
        "JswaError",
        "ModelError",
        "NothingAllowed",
        "PromptTooLong",
        "RequestError",
        "TaskSetError",
        "UnsupportedModel",
        "WeightsError",
    ),
    "jswa.frontend.pooled_call": ("EmbeddingRequestOutput", "ScoringRequestOutput"),
    "jswa.llm": ("LLM",),
    "jswa.one_call": ("generate",),
    "jswa.types": ("CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jswa' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
