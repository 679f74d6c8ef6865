"""Schemas of request bodies. A null value counts as absent. `params` converts the values; `foreign` checks the rest."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from ..http import limits

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
Id = Annotated[str, Field(min_length=1, max_length=limits.MAX_ID_CHARS, pattern=r"^[!-~]+$")]
Logprobs = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]
# `text.prompts` checks the value: a pydantic union would try every alternative on every item of a long list.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": limits.MAX_PROMPTS},
                {**_IDS, "minItems": 1},
                {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1, "maxItems": limits.MAX_PROMPTS},
            ]
        }
    ),
]
TextsField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": limits.MAX_PROMPTS},
                {"type": "null"},
            ]
        }
    ),
]
# `params` checks these values: a long list of ids in a large body is an array, and pydantic would validate all wrong
# entries of an object before it counts them.
IdsField = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{**_IDS, "minItems": 1, "maxItems": limits.MAX_ALLOWED_IDS}, {"type": "null"}]}),
]
TokensField = Annotated[Any, WithJsonSchema({**_IDS, "maxItems": limits.MAX_DETOKENIZED})]
BiasField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": limits.MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]
VERBOSITIES = ("low", "medium", "high")
ROLES = ["system", "developer", "user", "assistant", "tool"]
# `text.messages` checks the fields of a message, with clearer errors than those of a union.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "required": ["role"], "properties": {"role": {"enum": ROLES}, "content": {}}}),
]


class Body(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Queued(Body):
    """The fields of all requests that wait for the engine. Unknown fields are stored, and `foreign` checks them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    stream: bool | None = None
    cache_salt: Id | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Id | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None


class Generation(Queued):
    """The fields that completions and chat have in common."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: BiasField = None
    allowed_token_ids: IdsField = None
    bad_words: Annotated[list[Text], Field(max_length=limits.MAX_BAD_WORDS, fail_fast=True)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    best_of: int | None = None
    min_tokens: Whole | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=limits.MAX_STOPS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[Whole], Field(max_length=limits.MAX_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprobs: Logprobs | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: bool | None = None


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: PromptField = None
    max_tokens: Whole | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Annotated[list[str], Field(max_length=8, fail_fast=True)] | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template: Any = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Any = None
    echo: bool | None = None


class Pooled(Queued):
    """The fields that embeddings, poolings and scores have in common; vLLM's names."""

    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None


class EmbeddingRequest(Pooled):
    """The body of POST /v1/embeddings."""

    input: PromptField = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling."""

    task: Literal["embed"] | None = None


class ScoreRequest(Pooled):
    """The body of POST /v1/score: `text_1` and `text_2`, or two other names that vLLM has for them."""

    text_1: TextsField = None
    text_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    items: TextsField = None
    data_1: TextsField = None
    data_2: TextsField = None
