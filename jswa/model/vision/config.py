"""Parsing of a Gemma 4 config's vision part: sizes of the tower, tokens that stand for images. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jswa.architecture import Activation
from jswa.errors import CheckpointError
from jswa.images.tokens import ImageTokens
from jswa.model.hf.common import Defaults, Usual, activation, usual
from jswa.model.hf.fields import Fields
from jswa.storage.json_object import shown

_KIND = "gemma4_vision"
_DEFAULTS = Defaults(
    vocab_size=1,  # the tower has none
    hidden_size=768,
    num_hidden_layers=16,
    num_attention_heads=12,
    max_position_embeddings=131_072,
    intermediate_size=3072,
    num_key_value_heads=12,
    head_dim=64,
)
_TEXT_WIDTH, _TEXT_VOCABULARY = 2304, 262_144  # defaults of the text part
_MAX_PATCH, _MAX_POOLING, _MAX_POSITIONS = 256, 64, 2**20


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower of Gemma 4.

    Attributes:
        width: size of a patch's hidden state.
        mlp: width of gate and up.
        theta: base of the rotary embedding, which turns half of a head by x and the other half by y.
        pooling: a soft token is the mean of pooling² patches.
        patch: pixels on a side of a patch; a patch has 3 · patch² numbers.
        positions: patches that an image may have along each axis, at most.
        clipped: linear layers have bounds for their inputs and outputs.
        standardize: pooled patches are shifted and scaled by learned numbers.
        out: width of the text model, which is that of a soft token.
    """

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    eps: float
    theta: float
    pooling: int
    patch: int
    positions: int
    clipped: bool
    standardize: bool
    out: int


def vision_config_of(config_json: Mapping[str, Any]) -> VisionConfig | None:
    """Return the vision tower that a config.json describes, or None if it has no `vision_config`.

    Raises CheckpointError that names the key if its type or size is wrong, and if jswa does not serve such a tower:
    another family's, other rotary embeddings, biases, or a text model whose image tokens see each other. Raises
    UnsupportedModel for an activation function that jswa does not have.
    """
    outer = Fields(dict(config_json), "config.json")
    table = outer.table("vision_config")
    if not table:
        return None
    fields = Fields(table, "config.json: vision_config")
    kind = fields.string("model_type", _KIND if outer.raw.get("model_type") == "gemma4" else "(none)")
    if kind != _KIND:
        raise CheckpointError(f"{fields.where}: model_type = {shown(kind)}: must be {_KIND}")
    if fields.boolean("attention_bias", False):
        raise fields.wrong("attention_bias", "must be false")
    text = _text(outer)
    if text.raw.get("use_bidirectional_attention") not in (None, False):  # "vision" in Gemma 4 26B and 31B
        limit = "must be null: the tokens of an image would see each other, also those behind them"
        raise text.wrong("use_bidirectional_attention", limit)
    return _tower(usual(fields, _KIND, (), _DEFAULTS), text)


def image_tokens_of(config_json: Mapping[str, Any]) -> ImageTokens:
    """Return the tokens that stand for images. Raises CheckpointError unless they are three different token ids."""
    fields = Fields(dict(config_json), "config.json")
    tokens = ImageTokens(
        fields.integer("image_token_id", 258_880, low=0),
        fields.integer("boi_token_id", 255_999, low=0),
        fields.integer("eoi_token_id", 258_882, low=0),
    )
    if len(set(tokens)) < len(tokens):
        raise CheckpointError(
            f"{fields.where}: image_token_id, boi_token_id, eoi_token_id = {', '.join(map(str, tokens))}: "
            "must be different tokens"
        )
    return tokens


def pad_token_of(config_json: Mapping[str, Any]) -> int:
    """Return the token whose embeddings per layer a soft token has. Raises CheckpointError if it is none."""
    text = _text(Fields(dict(config_json), "config.json"))
    return text.integer("pad_token_id", 0, low=0, high=text.integer("vocab_size", _TEXT_VOCABULARY) - 1)


def _text(outer: Fields) -> Fields:
    return Fields(outer.table("text_config"), "config.json: text_config")


def _tower(u: Usual, text: Fields) -> VisionConfig:
    fields = u.fields
    if u.head_dim % 4:
        raise fields.wrong("head_dim", "must be a multiple of 4: each half of a head is turned in pairs")
    if u.heads % u.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads = {u.heads}")
    return VisionConfig(
        width=u.d_model,
        mlp=fields.width("intermediate_size", u.defaults.intermediate_size),
        layers=u.layers,
        heads=u.heads,
        kv_heads=u.kv_heads,
        head_dim=u.head_dim,
        activation=activation(u, "hidden_activation", "gelu_pytorch_tanh"),
        eps=u.norm.eps,
        theta=_theta(fields),
        pooling=fields.integer("pooling_kernel_size", 3, high=_MAX_POOLING),
        patch=fields.integer("patch_size", 16, high=_MAX_PATCH),
        positions=fields.integer("position_embedding_size", 10_240, high=_MAX_POSITIONS),
        clipped=fields.boolean("use_clipped_linears", False),
        standardize=fields.boolean("standardize", False),
        out=text.width("hidden_size", _TEXT_WIDTH),
    )


def _theta(fields: Fields) -> float:
    """Return the base of the rotary embedding. Older configs call its axial form "default"."""
    rope = Fields(fields.table("rope_parameters"), f"{fields.where}: rope_parameters")
    if rope.string("rope_type", "axial") not in ("axial", "default"):
        raise rope.wrong("rope_type", "must be axial")
    return rope.number("rope_theta", 100.0)
