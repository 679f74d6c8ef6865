"""Kinds of turns that a chat template cannot write, so that nobody can read them: docs/answers.md has the reasons."""

from collections.abc import Mapping

# In `f(NAME="x")` these names end elsewhere, or are none.
_PYTHON = frozenset(
    f"key: {key}"
    for key in ("nothing", "an equals sign", "a comma", "a quote", "an apostrophe", "a bracket", "a brace")
)
# A text with all marks between one parameter and the next looks like two parameters.
_XML = frozenset({"call as text: Qwen's XML"})
OURS: Mapping[str, frozenset[str]] = {
    "gemma3": _PYTHON,
    "olmo3": _PYTHON,
    "llama4, Python": _PYTHON,
    "qwen_xml": _XML,
    "qwen_xml, marks as texts": _XML,
}
# The template calls itself without end for a parameter whose type is null.
_HERMES = frozenset({"value: null"})
# The template refuses them: "only supports single tool-calls at once".
_LLAMA = frozenset({"two calls", "two equal calls", "five calls", "text before two calls", "reasoning and text before"})
# Writes no comma between two arguments, and text behind the calls.
_GEMMA3 = _PYTHON | {
    "several arguments", "five calls", "text before", "text with a brace before", "text before two calls",
    "reasoning and text before",
}  # fmt: skip
REAL: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash",
            "vllm-tool_chat_template_qwen3coder",
        ), _XML,
    ),
    **dict.fromkeys(
        (
            "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "vllm-tool_chat_template_hermes",
        ), _HERMES,
    ),
    **dict.fromkeys(
        (
            "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct",
            "vllm-tool_chat_template_llama3.1_json", "vllm-tool_chat_template_llama3.2_json",
        ), _LLAMA,
    ),
    "vllm-tool_chat_template_gemma3_pythonic": _GEMMA3,
}  # fmt: skip
# Writes all values as texts between quotes, those within as they are.
UNREADABLE = frozenset({"vllm-tool_chat_template_llama4_pythonic"})
