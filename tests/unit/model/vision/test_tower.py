"""The tower's soft tokens are those of transformers, whatever the padding and the order of patches."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from jswa.model.transformer import Params
from jswa.model.vision.config import VisionConfig, vision_config_of
from jswa.model.vision.encoder import compiled_tower
from jswa.model.vision.gemma4 import PADDING
from jswa.model.vision.weights import load_tower
from tests.parity.images.load import MOST_TOKENS, DrawnPicture, ImageFixture, load_images, names
from tests.parity.weights import write_checkpoint

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def loaded(fixture: ImageFixture, folder: Path, dtype: Any = F32) -> tuple[VisionConfig, Params]:
    """Return the tower of a fixture."""
    write_checkpoint(folder, fixture.config, fixture.tensors)
    config = vision_config_of(fixture.config)
    assert config is not None
    return config, load_tower(folder, config, dtype)


def encoded(
    config: VisionConfig, params: Params, picture: DrawnPicture, tokens: int = MOST_TOKENS, fill: int = 0
) -> Float[np.ndarray, "S M"]:
    """Return the soft tokens of a picture that is padded to a number of tokens with pixels of one value."""
    padding = tokens * config.pooling**2 - len(picture.patches)
    patches = np.pad(picture.patches, ((0, padding), (0, 0)), constant_values=fill)
    positions = np.pad(picture.positions, ((0, padding), (0, 0)), constant_values=PADDING)
    run = compiled_tower(config, params, tokens).run
    return run(patches, positions, lambda seconds: None)[: picture.tokens]


@pytest.mark.parametrize("name", names())
def test_soft_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    fixture = load_images(name)
    config, params = loaded(fixture, tmp_path)
    for picture, expected in zip(fixture.pictures, fixture.soft_tokens, strict=True):
        np.testing.assert_allclose(encoded(config, params, picture), expected, rtol=0, atol=2e-5)


def test_others_get_a_turn_after_each_layer(tmp_path: Path) -> None:
    (config, params), turns = loaded(load_images("clipped"), tmp_path), list[float]()
    patches = np.zeros((MOST_TOKENS * config.pooling**2, 3 * config.patch**2), np.uint8)
    positions = np.full((len(patches), 2), PADDING, np.int32)
    compiled_tower(config, params, MOST_TOKENS).run(patches, positions, turns.append)
    assert len(turns) == config.layers
    assert min(turns) > 0


@pytest.mark.parametrize("name", names())
def test_sixteen_bits_are_near(name: str, tmp_path: Path) -> None:
    fixture = load_images(name)
    config, params = loaded(fixture, tmp_path, BF16)
    for picture, expected in zip(fixture.pictures, fixture.soft_tokens, strict=True):
        found = encoded(config, params, picture)
        assert found.dtype == BF16
        assert np.sqrt(np.mean((found.astype(np.float32) - expected) ** 2)) < 0.03 * expected.std()


def test_padding_does_not_matter(tmp_path: Path) -> None:
    """Neither how much there is, nor what its pixels are."""
    fixture = load_images("clipped")
    config, params = loaded(fixture, tmp_path)
    picture = fixture.pictures[1]
    alone = encoded(config, params, picture, picture.tokens)
    for tokens, fill in ((MOST_TOKENS, 0), (MOST_TOKENS, 255), (7, 9)):
        np.testing.assert_allclose(encoded(config, params, picture, tokens, fill), alone, rtol=0, atol=1e-5)


def test_patches_may_come_in_any_order(tmp_path: Path) -> None:
    fixture = load_images("standardized")
    config, params = loaded(fixture, tmp_path)
    picture = fixture.pictures[2]
    order = np.random.default_rng(0).permutation(len(picture.patches))
    shuffled = picture._replace(patches=picture.patches[order], positions=picture.positions[order])
    np.testing.assert_allclose(encoded(config, params, shuffled), fixture.soft_tokens[2], rtol=0, atol=2e-5)


def test_queries_in_several_parts_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a rest: 180 patches in parts of 64."""
    fixture = load_images("clipped")
    config, params = loaded(fixture, tmp_path)
    monkeypatch.setattr("jswa.model.vision.gemma4.QUERIES", 64)
    np.testing.assert_allclose(encoded(config, params, fixture.pictures[3]), fixture.soft_tokens[3], rtol=0, atol=2e-5)
