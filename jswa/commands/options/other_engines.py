"""Options of vLLM, SGLang and llama.cpp that jswa does not have, with what it has instead.

docs/coming-from.md says the same at more length; a test compares them.
"""

import re
from collections.abc import Mapping

_ALWAYS = "is not needed: it is always on"
_MEMORY = "is --host-kv-bytes here, such as 64G"
_DRAFTS = "is --speculative-config here"
_NO_EAGER = "has no counterpart: every step is compiled"
_ONE_HOST = "has no counterpart: start a server per replica; --tensor-parallel-size shares a model between devices"
_PIPELINE = "has no counterpart: use --tensor-parallel-size, which shares a model between devices"
_MODEL = "has no counterpart: the model is the first argument, as in jswa serve MODEL"

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
    "--disable-log-requests": "is not needed: --log-level warning logs no requests",
}
SGLANG: Mapping[str, str] = {
    "--model-path": _MODEL,
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
    "-m": "has no counterpart: the model is the first argument, a checkpoint in safetensors; GGUF files are not read",
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


def hint(option: str) -> str | None:
    """Return a sentence about an option of another engine; None if no table has it.

    Args:
        option: as it was typed, also with `=value` and with `_` for `-`.
    """
    name = re.sub("(?<=[^-])_", "-", option.partition("=")[0])
    for engine, table in ENGINES.items():
        if name in table:
            return f"{engine}'s {name} {table[name]}."
    return None
