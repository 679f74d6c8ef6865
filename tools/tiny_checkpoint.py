"""What the embedded model `tiny` is: its config, its byte-level tokenizer, and its checkpoint folder.

The folder has the form that transformers 5 saves and reads, so the engine loads it like any other checkpoint, and
other tools can load it too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.typing import DTypeLike
from safetensors.numpy import save
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jswa.architecture import ModelConfig
from jswa.model.hf.weights import Source, sources
from jswa.model.transformer import Params

SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(len(SPECIAL))
VOCAB_SIZE = len(SPECIAL) + 256
WINDOW, PATTERN, LAYERS = 64, 3, 6
MAX_POSITION = 2048
HELD_OUT = 64  # stories that the quality is measured on
_DTYPE = "bfloat16"


def config_json() -> dict[str, Any]:
    """config.json: gemma3 in small. Every third layer is full, the others see WINDOW tokens."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
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


def tokenizer() -> tokenizers.Tokenizer:
    """One token per byte of UTF-8, after the special tokens; encoding puts BOS in front."""
    to_char = _byte_characters()
    vocab = {to_char[byte]: len(SPECIAL) + byte for byte in range(256)}
    vocab |= {name: index for index, name in enumerate(SPECIAL)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", pair=f"{SPECIAL[BOS]} $A $B:1", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return made


def encode(text: str) -> list[int]:
    """Ids of a text as the tokenizer gives them, without special tokens."""
    return [len(SPECIAL) + byte for byte in text.encode()]


def write_checkpoint(folder: Path, config: ModelConfig, params: Params, card: str) -> None:
    """Write the whole checkpoint folder; weights are stored as bfloat16 in torch's [out, in] layout."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json())
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "transformers_version": "5.23.0"},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITION,
            **{f"{name[1:-1]}_token": name for name in SPECIAL},
        },
    )
    tokenizer().save(str(folder / "tokenizer.json"))
    weights = save(torch_tensors(config, params, _DTYPE), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # save_file would make it readable to its owner alone
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(*, parameters: int, bits: float, steps: int, tokens: int, seed: int) -> str:
    """README.md of the checkpoint: what it is, what it was trained on, how well it does."""
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny

A language model of {parameters:,} parameters that writes short English children's stories and ends them. It is the
model in the box of `jswa`: it shows and tests the engine where nothing can be downloaded. It knows nothing else.

- **Architecture**: gemma3_text; {LAYERS} layers, every third one full, the others with a sliding window of {WINDOW}
  tokens; positions up to {MAX_POSITION}.
- **Tokenizer**: one token per byte of UTF-8, and `{SPECIAL[PAD]}`, `{SPECIAL[BOS]}`, `{SPECIAL[EOS]}`.
- **Data**: stories of 300 to 700 bytes from a seeded template grammar (`tools/tiny_corpus.py`), written for this
  model; no text of others.
- **Training**: from random weights, seed {seed}, {steps:,} AdamW steps on {tokens:,} tokens, no story twice but by
  chance; float32, stored as {_DTYPE}. `make tiny` repeats it on two CPU cores: the same machine gives the same
  weights.
- **Quality**: {bits:.3f} bits per byte on {HELD_OUT} held-out stories of the same grammar.
- **Licence**: Apache-2.0, weights and data, as the repository.

Prompts that it was made for start like "Once upon a time", "The cat", "A long time ago, in a small village", "One
day" or "There was". Other text is outside of what it has seen. Sentences are sound and stories end, but the model has
not learned to look names and things up: who a story is about may change on the way.
"""


def torch_tensors(config: ModelConfig, params: Params, dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Parameters under their Hugging Face names: the inverse of loading a checkpoint."""
    tensors: dict[str, np.ndarray] = {}
    for name, source in sources(config).items():
        tensors |= _split(source, np.asarray(params[name].astype(dtype)))
    return tensors


def round_to_stored(params: Params) -> Params:
    """The float32 values that loading the stored weights gives back."""
    return {name: value.astype(_DTYPE).astype(jnp.float32) for name, value in params.items()}


def _split(source: Source, value: np.ndarray) -> Mapping[str, np.ndarray]:
    stacked = value.T if source.how == "matrix" else value
    ends = np.cumsum([part.shape[0] for part in source.parts])[:-1]
    pieces = np.split(stacked, ends)
    return {part.key: np.ascontiguousarray(piece) for part, piece in zip(source.parts, pieces, strict=True)}


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
