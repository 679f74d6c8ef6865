"""The config, chat template and checkpoint folder of `tiny`.

The folder has the format of transformers 5, so the engine and other tools load it like any other checkpoint.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save

from jswa.architecture import ModelConfig
from jswa.model.hf.source import Source
from jswa.model.hf.tensor_map import sources
from jswa.model.transformer import Params
from tools.tiny import tokenizer
from tools.tiny.tasks import ASSISTANT, CALL, END, RESULT, SYSTEM, TOOLS, USER
from tools.tiny.tokenizer import BOS, END_OF_TURN, EOS, PAD, SPECIAL, VOCAB_SIZE

WINDOW, PATTERN, LAYERS = 64, 3, 6
MAX_POSITION = 4096
_DTYPE = "bfloat16"


def config_json() -> dict[str, Any]:
    """Return config.json: a small gemma3. Every third layer is full, the others see WINDOW tokens."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW,
        "sliding_window_pattern": PATTERN,
        "layer_types": ["sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(LAYERS)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "use_cache": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": _DTYPE,
        "transformers_version": "5.23.0",
    }


CHAT_TEMPLATE = f"""{{%- set roles = ("system", "user", "assistant", "tool") -%}}
{{%- for role in messages | map(attribute="role") if role not in roles -%}}
{{{{ raise_exception("role " ~ role ~ ": tiny knows system, user, assistant and tool") }}}}
{{%- endfor -%}}
{{{{ bos_token }}}}
{{%- if tools -%}}
{{{{ "{TOOLS}" }}}}
{{%- for tool in tools -%}}
{{%- set function = tool.function if tool.function is defined else tool -%}}
{{{{ "" if loop.first else "\\n" }}}}{{{{ function.name ~ "(" }}}}
{{%- for name, one in (function.parameters or {{}}).properties | items -%}}
{{{{ "" if loop.first else ", " }}}}{{{{ name ~ (": " ~ one.type if one.type is string else "") }}}}
{{%- endfor -%}}
{{{{ ")" ~ (" " ~ function.description if function.description else "") }}}}
{{%- endfor -%}}
{{{{ "{END}" }}}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{{{ "<|" ~ message.role ~ "|>" ~ (message.content or "") }}}}
{{%- for call in message.tool_calls or [] -%}}
{{%- set arguments = call.function.arguments -%}}
{{{{ "{CALL}" ~ '{{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' }}}}
{{{{- (arguments if arguments is string else arguments | tojson) ~ "}}" }}}}
{{%- endfor -%}}
{{{{ "{END}" }}}}
{{%- endfor -%}}
{{{{ "{ASSISTANT}" if add_generation_prompt }}}}"""
RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "start_anchor": ASSISTANT,
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close_pattern": f"(?={re.escape(CALL)})|{re.escape(END)}|<eos>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": [END, "<eos>"]},
    },
}


# First messages that the chat page offers.
EXAMPLES = [
    "Hello! My name is Bruno.",
    "Tell me a story about a fox named Max.",
    "Write a JSON record with name, age and town: Rosa is 7 years old and lives in Paris.",
]


def write_checkpoint(folder: Path, config: ModelConfig, params: Params, card: str) -> None:
    """Write the whole checkpoint folder; weights are stored as bfloat16 in torch's [out, in] layout."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json())
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS,
            "eos_token_id": [EOS, END_OF_TURN],
            "pad_token_id": PAD,
            "transformers_version": "5.23.0",
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITION,
            **{f"{name[1:-1]}_token": name for name in SPECIAL[:3]},
            "additional_special_tokens": list(SPECIAL[3:]),
            "response_template": RESPONSE_TEMPLATE,
        },
    )
    _write_json(folder / "chat_examples.json", {"messages": EXAMPLES})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.shared().save(str(folder / "tokenizer.json"))
    weights = save(torch_tensors(config, params, _DTYPE), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # save_file would make it readable by its owner only
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(*, parameters: int, scores: Mapping[str, float], steps: int, tokens: int, seed: int) -> str:
    """Return README.md of the checkpoint: architecture, training data and scores."""
    table = "\n".join(f"| {name} | {value:.3f} |" for name, value in scores.items())
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny

A language model of {parameters:,} parameters: the model in the box of `jswa`. It shows and tests the engine where
nothing can be downloaded. It remembers what it was told far beyond its sliding window, calls tools, tells short
stories, copies, adds, and writes small JSON records. It knows nothing about the world.

- **Architecture**: gemma3_text; {LAYERS} layers, every third one full, the others with a sliding window of {WINDOW}
  tokens; positions up to {MAX_POSITION}.
- **Tokenizer**: byte-level BPE of {VOCAB_SIZE} tokens, digits one by one.
- **Chat**: `{USER}…{END}{ASSISTANT}…{END}`, and `{SYSTEM}`, which it has not been taught to obey.
- **Tools**: `{TOOLS}f(city: string) What it does.{END}` lists them, a line each, before all messages; a call is
  `{ASSISTANT}{CALL}{{"name": "f", "arguments": {{"city": "Oslo"}}}}{END}`, and its result `{RESULT}…{END}`. It
  knows nine tools, each by three names: a calculator, the weather, the time, prices, messages, timers, lights, phone
  numbers, and search.
- **Data**: made by seeded grammars for this model (`tools/tiny`): stories, pass keys, lists of numbers, talk, sums,
  copying, JSON records, tool calls; and four fifths of *Alice's Adventures in Wonderland* (1865, public domain).
- **Training**: from random weights, seed {seed}, {steps:,} steps (Muon for matrices, Adam for the rest) on {tokens:,}
  tokens, in rows of 320, then 768, then 2,304; float32, stored as {_DTYPE}. `make tiny` repeats it.
- **Licence**: Apache-2.0, weights and data, as the repository; the book is in the public domain.

Held-out scores at the end of the training: accuracy of whole answers (the number is the distance in tokens between what
was told and the question, or the number of words to copy).

| task | score |
|---|---|
{table}
"""


def torch_tensors(config: ModelConfig, params: Params, dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Return the parameters under their Hugging Face names: the inverse of loading a checkpoint."""
    tensors: dict[str, np.ndarray] = {}
    for name, source in sources(config).items():
        tensors |= _split(source, np.asarray(params[name].astype(dtype)))
    return tensors


def round_to_stored(params: Params) -> Params:
    """Return the parameters as float32 values that a checkpoint, stored in bfloat16, loads as."""
    return {name: value.astype(_DTYPE).astype(jnp.float32) for name, value in params.items()}


def _split(source: Source, value: np.ndarray) -> Mapping[str, np.ndarray]:
    stacked = value.T if source.layout == "matrix" else value
    ends = np.cumsum([part.shape[0] for part in source.parts])[:-1]
    pieces = np.split(stacked, ends)
    return {part.key: np.ascontiguousarray(piece) for part, piece in zip(source.parts, pieces, strict=True)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
