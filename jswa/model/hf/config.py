"""Parsing of config.json to ModelConfig: the entry of all families.

Configs may be in the old hub form or the version-5 form, and text-only or multimodal.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.common import usual
from jswa.model.hf.families import FAMILIES
from jswa.model.hf.fields import Fields
from jswa.model.hf.other_blocks import missing_block
from jswa.model.hf.quantization import parse_quantization, read_config
from jswa.storage.json_object import read_optional, shown

# Model types of the text part of multimodal configs whose text_config may lack model_type.
_TEXT_PARTS = {
    "cohere_compass": "cohere_compass_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "exaone4_5": "exaone4",
    "step3p7": "step3p5",
}
# Other names of a family.
_ALIASES = {
    "exaone4_5_text": "exaone4",
    "mimo_v2": "mimo_v2_flash",
    "mimo_v2_pro": "mimo_v2_flash",
    "phi4mm": "phi4_multimodal",
    "step3p7_text": "step3p5",
}
# Families whose configs have another's model type: by model type and class in `architectures`.
_CLASSES = {("gemma3_text", "Rnj1ForCausalLM"): "rnj1"}


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint folder.

    Raises CheckpointError if a file is missing, is not JSON, or has a key of the wrong type or range. Raises
    UnsupportedModel if the architecture, or a feature that it needs, is not implemented.
    """
    raw = read_config(folder)
    return parse_config(raw, eos_token_id=read_optional(folder / "generation_config.json").get("eos_token_id"))


def parse_config(raw: dict[str, Any], *, eos_token_id: object = None, weights: bool = True) -> ModelConfig:
    """Derive the ModelConfig of a config.json.

    Args:
        eos_token_id: end tokens of generation_config.json, which override the config's own.
        weights: False if only shapes are wanted; weights may then have a type that jswa cannot load.
    """
    outer = Fields(raw, "config.json")
    fields, family = _text_part(outer)
    if weights:
        parse_quantization(raw)
    entry = FAMILIES[family]
    eos = eos_token_id
    if eos is None:
        known = (raw.get("eos_token_id"), fields.raw.get("eos_token_id"), entry.eos)
        eos = next((ids for ids in known if ids is not None), None)
    aliased = {entry.aliases.get(key, key): value for key, value in fields.raw.items() if key in entry.aliases}
    fields = Fields({**aliased, **fields.raw}, fields.where)
    model = entry.parse(usual(fields, family, _token_ids(eos), entry.defaults))
    return model if fields.where == outer.where else _wrapped(model, outer, fields)


def _wrapped(model: ModelConfig, outer: Fields, fields: Fields) -> ModelConfig:
    """Apply the fields that a multimodal config sets for its text part.

    The multimodal config decides whether embeddings are tied. If neither part says so, they are, unless the checkpoint
    has another head.
    """
    tied = outer.boolean("tie_word_embeddings", fields.boolean("tie_word_embeddings", True))
    softcap = (
        None if outer.raw.get("model_type") == "gemma3" else model.final_softcap
    )  # gemma3 caps logits in text-only models alone
    return dataclasses.replace(model, tie_embeddings=tied, final_softcap=softcap)


def _text_part(outer: Fields) -> tuple[Fields, str]:
    """Return the keys of the text decoder, and its family. Raises UnsupportedModel if jswa does not run it."""
    family, fields = outer.string("model_type", None), outer
    if family not in FAMILIES and missing_block(family) is not None:
        raise _with_missing_block(outer, family)
    if family not in FAMILIES and (family in _TEXT_PARTS or outer.raw.get("text_config") is not None):
        fields = Fields(outer.table("text_config"), "config.json: text_config")
        family = fields.string("model_type", _TEXT_PARTS.get(family, family))
    family = _ALIASES.get(_TEXT_PARTS.get(family, family), _TEXT_PARTS.get(family, family))
    classes = fields.raw.get("architectures")
    for (kind, name), other in _CLASSES.items():
        if family == kind and isinstance(classes, list) and name in classes:
            family = other
    if family in FAMILIES:
        return fields, family
    if missing_block(family) is not None:
        raise _with_missing_block(fields, family)
    raise UnsupportedModel(
        f"{fields.where}: model_type = {shown(family)}: must be one of {', '.join(sorted(FAMILIES))}"
    )


def _with_missing_block(fields: Fields, family: str) -> UnsupportedModel:
    block = missing_block(family)
    return UnsupportedModel(f"{fields.where}: model_type = {shown(family)} has {block}: not implemented")


def _token_ids(value: object) -> tuple[int, ...]:
    ids: list[Any] = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31 for x in ids):
        raise CheckpointError(f"eos_token_id = {shown(value)}: must be a token id or a list of token ids")
    return tuple(ids)
