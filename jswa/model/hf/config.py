"""config.json to ModelConfig and tensor names: one entry per model_type.

Facts per family are transformers 5.23's: a key that is absent has the default of that family's config class, since
checkpoints on the hub leave such keys out. Old hub forms and version-5 forms of the rotary parameters both parse.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf import dense, gemma, mixture
from jswa.model.hf.fields import Fields
from jswa.model.hf.names import SANDWICH_NORMS, Names


class Family(NamedTuple):
    """How one model_type reads: its config, the names of its tensors, the end token of a config without any."""

    parse: Callable[[Fields, tuple[int, ...]], ModelConfig]
    names: Names = Names()
    eos: int | None = None


_GPT_OSS = Names(router="router.weight", router_bias="router.bias", experts="interleaved")
_MIMO = Names(sinks="attention_sink_bias")
_MIXTRAL = Names(mlp="block_sparse_moe", gate="w1", up="w3", down="w2")
_LLAMA4 = Names(mlp="feed_forward", router="router.weight", experts="halves", shared="shared_expert")
FAMILIES = {
    "llama": Family(dense.llama, eos=2),
    "mistral": Family(dense.mistral, eos=2),
    "ministral": Family(dense.mistral, eos=2),
    "qwen2": Family(dense.qwen2),
    "qwen3": Family(dense.qwen3),
    "gemma2": Family(gemma.gemma2, Names(norms=SANDWICH_NORMS), eos=1),
    "gemma3_text": Family(gemma.gemma3, Names(norms=SANDWICH_NORMS), eos=1),
    "gpt_oss": Family(mixture.gpt_oss, _GPT_OSS),
    "mixtral": Family(mixture.mixtral, _MIXTRAL, eos=2),
    "qwen3_moe": Family(mixture.qwen3_moe),
    "mimo_v2_flash": Family(mixture.mimo_v2_flash, _MIMO),
    "llama4_text": Family(mixture.llama4_text, _LLAMA4, eos=2),
}
# Multimodal checkpoints whose text part is one of these.
_WRAPPERS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint folder.

    Raises CheckpointError where a file is missing, is not JSON, or has a key of the wrong type or range;
    UnsupportedModel where the architecture, or a feature it asks for, is not implemented.
    """
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw, eos_token_id=eos)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def parse_config(raw: dict[str, Any], *, eos_token_id: object = None) -> ModelConfig:
    """Derive the ModelConfig of a config.json. `eos_token_id` (generation_config.json) wins over the config's own."""
    outer = Fields(raw, "config.json")
    family = outer.string("model_type", None)
    fields = outer
    if family in _WRAPPERS:
        fields = Fields(outer.table("text_config"), "config.json: text_config")
        family = fields.string("model_type", _WRAPPERS[family])
    if family not in FAMILIES:
        raise UnsupportedModel(f"config.json: model_type = {family!r} is not one of {', '.join(sorted(FAMILIES))}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None or fields.raw.get(key) is not None:
            raise UnsupportedModel(f"config.json: {key} asks for quantised weights, which are not implemented")
    eos = eos_token_id
    if eos is None:
        eos = fields.raw.get("eos_token_id", raw.get("eos_token_id", FAMILIES[family].eos))
    model = FAMILIES[family].parse(fields, _token_ids(eos))
    if fields is not outer:
        # Of a multimodal gemma3 transformers reads this at the top level alone, and caps no logits of the text part.
        tied = outer.boolean("tie_word_embeddings", True) if family == "gemma3_text" else model.tie_embeddings
        model = dataclasses.replace(model, tie_embeddings=tied, final_softcap=None)
    return model


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(x, int) and x >= 0 for x in ids):
        raise CheckpointError(f"eos_token_id = {value!r} must be a token id or a list of token ids")
    return tuple(ids)
