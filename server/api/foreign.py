"""Fields that other servers have and this one lacks. A field that would change the answer is refused by name.

The names come from the request schemas of OpenAI, vLLM, SGLang, llama.cpp, Ollama, TGI and text-generation-webui.
"""

import itertools
from collections.abc import Collection
from typing import Any

from ..http.errors import unsupported
from .schemas import Body, ChatRequest, CompletionRequest, Generation

_MOST_UNKNOWN = 256  # fields of one request that are checked for unknown names
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that turn a field off

_NO_SCHEMA: tuple[Any, ...] = (None, False, "")  # values that turn a schema off; an empty schema allows any JSON

# The reason for a refusal, the names of the fields, and the values with which they do not change the answer.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    (
        "is not supported: use structured_outputs",
        "grammar grammar_lazy grammar_triggers grammar_string regex ebnf structural_tag json_mode",
        _OFF,
    ),
    ("is not supported: use response_format", "json_schema response_schema format", _NO_SCHEMA),
    (
        "is a variable of the template: set it in chat_template_kwargs",
        "enable_thinking thinking think thinking_mode prompt_mode",
        (None,),
    ),
    ("is not supported: use reasoning_effort", "reasoning reasoning_control", _OFF),
    ("reasoning is not separated from a completion", "include_reasoning", (None, True)),
    ("is not supported: --response-template decides", "parse_reasoning separate_reasoning", (None, True)),
    ("is not supported: --response-template decides", "reasoning_format", (None, "auto", "deepseek")),
    (
        "a limit on reasoning tokens is not supported",
        """thinking_token_budget thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens
        reasoning_max_tokens max_reasoning_tokens""",
        (None, -1),
    ),
    (
        "is not supported: use max_tokens",
        "max_new_tokens max_output_tokens max_length num_predict max_generation_tokens",
        (None,),
    ),
    ("is not supported: use max_tokens", "n_predict", (None, -1)),
    ("is not supported: use min_tokens", "min_new_tokens min_length", _OFF),
    ("is not supported: use repetition_penalty", "repeat_penalty encoder_repetition_penalty", (None, 0, 1)),
    ("is not supported: use seed", "sampling_seed random_seed rng_seed", (None, -1)),
    ("is not supported: use stop", "stop_sequences stop_strings stop_words stopping_strings", _OFF),
    ("is not supported: use cache_salt", "extra_key", _OFF),
    ("is not supported: use n", "n_cmpl", (None, 1)),
    (
        "is not supported: send the adapter's name as model",
        "lora_path lora lora_request lora_name adapter_id adapters",
        _OFF,
    ),
    (
        "is not supported: send its fields at the top of the body",
        "extra_body extra_args sampling_params options parameters generation_config vllm_xargs",
        _OFF,
    ),
    (
        "token ids and inner values are not part of the answer",
        """return_token_ids return_tokens_as_token_ids return_tokens return_prompt_token_ids return_prompt_text
        return_hidden_states return_routed_experts return_sampling_mask return_meta_info return_text_in_logprobs
        return_full_text response_fields include""",
        _OFF,
    ),
    (
        "is not supported: use logprobs",
        """return_logprob top_logprobs_num token_ids_logprob logprob_token_ids n_probs post_sampling_probs details
        decoder_input_details top_n_tokens""",
        _OFF,
    ),
    ("is not supported: use logprobs", "logprob_start_len", (None, -1)),
    (
        "is not supported: the prompt is text, token ids or messages",
        """prompt_embeds input_embeds input_ids prompt_token_ids inputs input instructions system context raw template
        input_prefix input_suffix input_extra image_data images audio_data video_data multi_modal_data
        previous_response_id conversation session_params generation_prompt negative_prompt""",
        _OFF,
    ),
    (
        "is not supported: images are prepared as the checkpoint says",
        "mm_processor_kwargs media_io_kwargs max_dynamic_patch min_dynamic_patch",
        _OFF,
    ),
    (
        "is not supported",
        """logits_processors logit_processors custom_logit_processor custom_params stop_regex no_stop_trim max_time
        n_indent top_a xtc_probability dry_multiplier mirostat mirostat_mode dynatemp_range dynamic_temperature
        temperature_last smoothing_factor epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha min_keep samplers
        sampler_priority sampler_order repetition_detection watermark watermarking token_healing custom_token_bans
        banned_tokens banned_strings ban_eos_token web_search enable_search search_parameters safe_prompt
        preserved_tokens guardrails moderation beam_width truncate""",
        _OFF,
    ),
    (
        "is not supported",
        "typical_p typical tfs_z tfs smoothing_curve guidance_scale cfg_scale num_beams",
        (None, 0, 1),
    ),
    ("is not supported", "adaptive_target t_max_predict_ms", (None, 0, -1)),
    ("is not supported", "do_sample add_bos_token spaces_between_special_tokens", (None, True)),
    ("is not supported", "truncation_side", (None, "left")),
    ("is not supported", "truncation", (None, False, "disabled")),
    ("is not supported", "verbosity", (None, "medium")),
)
_WHY = {name: (why, neutral) for why, names, neutral in _REFUSED for name in names.split()}

# Fields that `structured` reads, and fields that do not change the answer: they name the user or the purpose, or ask
# for storage or speed.
_HARMLESS = """
    guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend
    user safety_identifier metadata store service_tier prompt_cache_key prompt_cache_retention prompt_cache_options
    prediction parallel_tool_calls stream_interval session_id cache_prompt id_slot slot_id n_cache_reuse keep_alive
    n_keep n_discard timings_per_token return_progress verbose sse_ping_interval backend_sampling length_penalty
    early_stopping xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_range dry_sequence_breakers
    mirostat_tau mirostat_eta dynatemp_exponent dynatemp_low dynatemp_high adaptive_decay repeat_last_n
    repetition_penalty_range stream_reasoning rid return_cached_tokens_details custom_labels
    return_token_offsets return_mm_kwargs
    routed_experts_prompt_start kv_transfer_params ec_transfer_params num_ctx num_batch num_gpu num_thread
"""
_CHAT_ONLY = ChatRequest.model_fields.keys() - CompletionRequest.model_fields.keys()
_COMPLETIONS_ONLY = CompletionRequest.model_fields.keys() - ChatRequest.model_fields.keys()
_EXPLAINED = {*_WHY, *_HARMLESS.split()}
_KNOWN = {*_EXPLAINED, *_CHAT_ONLY, *_COMPLETIONS_ONLY}


def refuse_foreign(body: Generation) -> list[str]:
    """Refuse a field that this route lacks and that would change the answer. Return the names that are unknown.

    Raises ApiError.
    """
    extra = body.model_extra
    if not extra:
        return []
    for name, (why, neutral) in _WHY.items():
        if name in extra and not _is_one_of(extra[name], neutral):
            raise unsupported(name, why)
    others, route = (_CHAT_ONLY, "chat/completions")
    if isinstance(body, ChatRequest):
        others, route = (_COMPLETIONS_ONLY, "completions")
    for name in sorted((others & extra.keys()) - _EXPLAINED):
        if not _says_nothing(name, extra[name], body):
            raise unsupported(name, f"is a field of /v1/{route}")
    return [name for name in itertools.islice(extra, _MOST_UNKNOWN) if name not in _KNOWN]


def unknown(body: Body, harmless: Collection[str]) -> list[str]:
    """Return the names of unknown fields of another protocol's request, and the types of tools that are left out."""
    tools = getattr(body, "tools", None) or ()
    kinds = {str(tool.get("type") or "function")[:100] for tool in tools if isinstance(tool, dict)}
    names = (name for name in itertools.islice(body.model_extra or (), _MOST_UNKNOWN) if name not in harmless)
    return [*names, *(f"tools.type={kind}" for kind in sorted(kinds - {"function", "custom"}))]


def _says_nothing(name: str, value: Any, body: Generation) -> bool:
    """Return whether a field of the other route has a value that would not change the answer of this route."""
    if name == "max_completion_tokens" and isinstance(body, CompletionRequest) and body.max_tokens is not None:
        return True  # load generators send both to either route
    return _is_one_of(value, (*_OFF, "none", "auto") if name in ("tool_choice", "function_call") else _OFF)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return (not isinstance(value, list | dict) or not value) and value in neutral
