"""Embeddings and scores of an `LLM`: requests whose prompts are pooled, and what is made of these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jswa.errors import GenerationError
from jswa.frontend.driver import Driver
from jswa.frontend.generate_call import GenerateCall
from jswa.frontend.outputs import CallOptions
from jswa.text.inputs import Prompt, Prompts, split_prompts
from jswa.text.pooling import PoolingConfig, pairs, similarity
from jswa.text.tokenizer import Tokenizer
from jswa.types import Pooling, RequestOutput


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of one prompt of `LLM.embed`; vLLM's names."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """How alike two texts are: the cosine of their embeddings."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The result of one pair of `LLM.score`; vLLM's names. The tokens are those of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class Pooler:
    """Pools the prompts of an engine's callers.

    Attributes:
        config: that of the checkpoint.
    """

    driver: Driver[Any]
    tokenizer: Tokenizer | None
    config: PoolingConfig

    def embed(
        self,
        prompts: Prompts,
        options: CallOptions,
        pooling: Pooling | None,
        dimensions: int | None,
        normalize: bool | None,
        *,
        show: bool,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts; arguments as of `LLM.embed`. Raises RequestError, GenerationError."""
        config = self.config if pooling is None else replace(self.config, pooling=pooling)
        found = self._pooled(split_prompts(prompts), config, dimensions, options, show)
        vectors = [config.embedding(pooled_of(one), dimensions, normalize).tolist() for one in found]
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(vector), one.prompt_token_ids, one.num_cached_tokens)
            for one, vector in zip(found, vectors, strict=True)
        ]

    def score(
        self, text_1: Prompts, text_2: Prompts, options: CallOptions, *, show: bool
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs; arguments as of `LLM.score`. Raises RequestError, GenerationError."""
        first, second = split_prompts(text_1), split_prompts(text_2)
        compared = pairs(len(first), len(second))
        found = self._pooled([*first, *second], self.config, None, options, show)
        scores = list[ScoringRequestOutput]()
        for at, other in compared:
            one, two = found[at], found[len(first) + other]
            score = ScoringOutput(similarity(pooled_of(one), pooled_of(two)))
            ids, cached = one.prompt_token_ids + two.prompt_token_ids, one.num_cached_tokens + two.num_cached_tokens
            scores.append(ScoringRequestOutput(two.request_id, score, ids, cached))
        return scores

    def _pooled(
        self, prompts: Sequence[Prompt], config: PoolingConfig, dimensions: int | None, options: CallOptions, show: bool
    ) -> list[RequestOutput]:
        call = GenerateCall(self.driver, self.tokenizer, prompts, config.params(dimensions), {}, {}, options)
        return call.collect(show=show)


def pooled_of(output: RequestOutput) -> Any:
    """Return the pooled hidden state [M] of an output. Raises the error of its request, or GenerationError."""
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        raise GenerationError("the request was aborted before its prompt was pooled")
    return output.pooled
