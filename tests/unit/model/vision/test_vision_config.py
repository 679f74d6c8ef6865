"""What a config.json says of a vision tower, and what is refused."""

import copy
from typing import Any

import pytest

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.images.tokens import ImageTokens
from jswa.model.vision.config import VisionConfig, image_tokens_of, pad_token_of, vision_config_of
from tests.parity.images.load import load_images
from tests.parity.load import read_config

PLAIN: dict[str, Any] = {"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision"}, "text_config": {}}


def changed(part: str, **keys: object) -> dict[str, Any]:
    """Return a config with some keys of a part changed."""
    config = copy.deepcopy(PLAIN)
    config[part] |= keys
    return config


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    assert vision_config_of(PLAIN) == VisionConfig(
        width=768,
        mlp=3072,
        layers=16,
        heads=12,
        kv_heads=12,
        head_dim=64,
        activation="gelu_tanh",
        eps=1e-6,
        theta=100.0,
        pooling=3,
        patch=16,
        positions=10_240,
        clipped=False,
        standardize=False,
        out=2304,
    )
    assert image_tokens_of(PLAIN) == ImageTokens(258_880, 255_999, 258_882)
    assert pad_token_of(PLAIN) == 0


def test_all_keys_are_read() -> None:
    """Of a config as transformers saves it."""
    config = load_images("standardized").config
    assert vision_config_of(config) == VisionConfig(
        width=32,
        mlp=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        activation="gelu_tanh",
        eps=1e-6,
        theta=30.0,
        pooling=3,
        patch=16,
        positions=24,
        clipped=False,
        standardize=True,
        out=48,
    )
    assert image_tokens_of(config) == ImageTokens(157, 155, 159)
    assert pad_token_of({**config, "text_config": config["text_config"] | {"pad_token_id": 7}}) == 7


def test_a_text_model_has_no_tower() -> None:
    assert vision_config_of(read_config("gemma4_text_base")) is None
    assert vision_config_of(PLAIN | {"vision_config": None}) is None


def test_older_configs_call_the_axial_form_default() -> None:
    """The repositories of E2B and E4B do."""
    found = vision_config_of(changed("vision_config", rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    assert found == vision_config_of(PLAIN)


@pytest.mark.parametrize(
    ("part", "keys", "message"),
    [
        (
            "vision_config",
            {"model_type": "siglip_vision_model"},
            "model_type = 'siglip_vision_model': must be gemma4",
        ),
        ("vision_config", {"attention_bias": True}, "attention_bias = True: must be false"),
        (
            "vision_config",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: rope_type = 'yarn': must be",
        ),
        ("vision_config", {"head_dim": 18}, "head_dim = 18: must be a multiple of 4"),
        ("vision_config", {"num_key_value_heads": 5}, "num_key_value_heads = 5: must divide num_attention_heads = 12"),
        ("vision_config", {"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a whole number from 1"),
        ("vision_config", {"use_clipped_linears": "yes"}, "use_clipped_linears = 'yes': must be true or false"),
        ("vision_config", {"pooling_kernel_size": 3.0}, "pooling_kernel_size = 3.0: must be a whole number"),
        ("vision_config", {"position_embedding_size": 2**21}, "position_embedding_size = 2097152: must be a whole"),
        ("text_config", {"use_bidirectional_attention": "vision"}, "tokens of an image would see each other"),
        ("text_config", {"hidden_size": -1}, "text_config: hidden_size = -1: must be"),
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_key(part: str, keys: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_config_of(changed(part, **keys))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="vision_config: hidden_activation = 'mish'"):
        vision_config_of(changed("vision_config", hidden_activation="mish"))


def test_tokens_are_checked() -> None:
    with pytest.raises(CheckpointError, match="boi_token_id = -1: must be a whole number from 0"):
        image_tokens_of(PLAIN | {"boi_token_id": -1})
    with pytest.raises(CheckpointError, match="258880, 258880, 258882: must be different"):
        image_tokens_of(PLAIN | {"boi_token_id": 258_880})
    with pytest.raises(CheckpointError, match="pad_token_id = 40: must be a whole number from 0 to 39"):
        pad_token_of(changed("text_config", pad_token_id=40, vocab_size=40))
