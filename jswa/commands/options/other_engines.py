"""Options of vLLM, SGLang and llama.cpp that jswa does not have, with what it has instead.

Most are errors, and a hint names jswa's own option. Those that ask for what jswa always does are taken, with a warning.
docs/coming-from.md says the same at more length; a test compares them.
"""

import re
from collections.abc import Mapping, Sequence

_ALWAYS = "is not needed: it is always on"
_MEMORY = "is --host-kv-bytes here, such as 64G"
_DRAFTS = "is --speculative-config here"
_NO_EAGER = "has no counterpart: every step is compiled"
_NO_PROMPTS = "is not needed: no prompt is logged, and --log-level warning logs no requests"
_ONE_HOST = "has no counterpart: start a server per replica; --tensor-parallel-size shares a model between devices"
_PIPELINE = "has no counterpart: use --tensor-parallel-size, which shares a model between devices"

VLLM: Mapping[str, str] = {
    "--enable-prefix-caching": f"{_ALWAYS}; --no-prefix-cache switches it off",
    "--no-enable-prefix-caching": "is --no-prefix-cache here",
    "--num-gpu-blocks-override": "is --kv-cache-memory-bytes here",
    "--enable-chunked-prefill": f"{_ALWAYS}; --max-num-batched-tokens is the size of a step",
    "--enforce-eager": _NO_EAGER,
    "--tool-call-parser": "is not needed: known families are recognised; --response-template chooses",
    "--reasoning-parser": "is not needed: known families are recognised; --response-template chooses",
    "--enable-auto-tool-choice": _ALWAYS,
    "--kv-offloading-size": _MEMORY,
    "--enable-sleep-mode": f"{_ALWAYS}: /sleep and /wake_up, with the admin key",
    "--enable-lora": "is not needed: use --lora-modules, or --max-loras to load adapters later",
    "--disable-hybrid-kv-cache-manager": "has no counterpart: local layers always keep their window only",
    "--tokenizer": "has no counterpart: the tokenizer is the checkpoint's",
    "--trust-remote-code": "has no counterpart: no code of a checkpoint is run",
    "--data-parallel-size": _ONE_HOST,
    "--pipeline-parallel-size": _PIPELINE,
    "--disable-log-requests": _NO_PROMPTS,
    "--no-enable-log-requests": _NO_PROMPTS,
    "--runner": "has no counterpart: every model generates, and gives embeddings too",
    "--convert": "has no counterpart: every model generates, and gives embeddings too",
    "--limit-mm-per-prompt": "is --max-images here",
    "--allowed-media-domains": "is --allowed-media-hosts here",
}
SGLANG: Mapping[str, str] = {
    "--model-path": "is --model here",
    "--context-length": "is --max-model-len here",
    "--mem-fraction-static": "is --gpu-memory-utilization here",
    "--max-running-requests": "is --max-num-seqs here",
    "--chunked-prefill-size": "is --max-num-batched-tokens here",
    "--page-size": "is --block-size here",
    "--tp-size": "is --tensor-parallel-size here",
    "--tp": "is --tensor-parallel-size here",
    "--dp-size": _ONE_HOST,
    "--disable-radix-cache": "is --no-prefix-cache here",
    "--disable-cuda-graph": _NO_EAGER,
    "--swa-full-tokens-ratio": "has no counterpart: full and local pages share one arena, without a fixed ratio",
    "--schedule-policy": "has no counterpart: docs/operating.md describes the order of requests",
    "--enable-hierarchical-cache": _MEMORY,
    "--hicache-size": _MEMORY,
    "--hicache-storage-backend": "is --disk-kv PATH:BYTES here",
    "--speculative-algorithm": _DRAFTS,
    "--speculative-draft-model-path": _DRAFTS,
}
LLAMA_CPP: Mapping[str, str] = {
    "-m": "has no counterpart: the model is the first argument, a folder or a GGUF file",
    "-hf": "has no counterpart: the model is the first argument, OWNER/NAME or OWNER/NAME:Q8_0",
    "-c": "is --max-model-len here",
    "--ctx-size": "is --max-model-len here",
    "-np": "is --max-num-seqs here",
    "--parallel": "is --max-num-seqs here",
    "-b": "is --max-num-batched-tokens here",
    "-ub": "is --max-num-batched-tokens here",
    "-ctk": "is --kv-cache-dtype fp8 here",
    "-ctv": "is --kv-cache-dtype fp8 here",
    "-ngl": "has no counterpart: a model runs on its devices as a whole",
    "--n-gpu-layers": "has no counterpart: a model runs on its devices as a whole",
    "--swa-full": "is not needed: any request finds any prefix",
    "--cache-reuse": "is not needed: any request finds any prefix",
    "--jinja": _ALWAYS,
    "-md": _DRAFTS,
    "--model-draft": _DRAFTS,
    "-cram": _MEMORY,
    "--cache-ram": _MEMORY,
    "--slot-save-path": "has no counterpart: llm.save_cache in Python keeps the cache",
    "--grammar": 'is a field of a request: structured_outputs: {"grammar": …}',
}
ENGINES: Mapping[str, Mapping[str, str]] = {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": LLAMA_CPP}

# Other names of options of jswa.
SAME: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "--model-path": "--model",
}
# Options that ask for what jswa always does.
HARMLESS = {
    "--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice", "--enable-sleep-mode",
    "--trust-remote-code", "--disable-log-requests", "--no-enable-log-requests", "--jinja", "--swa-full",
}  # fmt: skip


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with jswa's names of options and without harmless ones, and a warning for each of these."""
    kept: list[str] = []
    warnings: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*kept, *words[at:]], warnings
        option, equals, value = word.partition("=")
        name = _name(option)
        if name in HARMLESS and (not equals or value.lower() == "true"):
            warnings.append(without_effect(name))
        else:
            kept.append(f"{SAME[name]}{equals}{value}" if name in SAME else word)
    return kept, warnings


def without_effect(name: str) -> str:
    """Return a sentence that says why a harmless option changes nothing."""
    why = next(table[name] for table in ENGINES.values() if name in table).partition(": ")[2]
    return f"{name} has no effect: {why}"


def hint(option: str) -> str | None:
    """Return a sentence about an option of another engine; None if no table has it.

    Args:
        option: as it was typed, also with `=value` and with `_` for `-`.
    """
    name = _name(option.partition("=")[0])
    for engine, table in ENGINES.items():
        if name in table:
            return f"{engine}'s {name} {table[name]}."
    return None


def _name(option: str) -> str:
    """Return an option's name with hyphens, as the tables have it."""
    return re.sub("(?<=[^-])_", "-", option) if option.startswith("-") else option
