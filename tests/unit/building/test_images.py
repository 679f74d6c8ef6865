"""The part of an engine that reads images (jswa/building/images.py): what its tower takes."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from jswa.building.images import tower_bytes
from jswa.model.vision.config import vision_config_of
from jswa.model.vision.weights import load_tower
from tests.parity.images.load import load_images, names
from tests.parity.weights import write_checkpoint

MIB = 2**20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", names())
def test_a_config_tells_the_bytes_of_the_tower_that_is_loaded(name: str, dtype: str, tmp_path: Path) -> None:
    fixture = load_images(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    vision = vision_config_of(fixture.config)
    assert vision is not None
    params = load_tower(tmp_path, vision, jnp.dtype(dtype))
    assert tower_bytes(fixture.config, dtype) == sum(value.nbytes for value in params.values()) > 0


def test_a_model_of_text_has_no_tower_and_one_that_is_not_served_takes_no_memory() -> None:
    """The tower of Gemma 4 E2B and E4B, whose sizes are the defaults, takes 326 MiB in 16 bits."""
    served = {"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision"}, "text_config": {}}
    assert 320 < tower_bytes(served, "bfloat16") / MIB < 330
    assert tower_bytes({"model_type": "gemma4", "text_config": {}}, "bfloat16") == 0
    seeing_each_other = served | {"text_config": {"use_bidirectional_attention": "vision"}}
    assert tower_bytes(seeing_each_other, "bfloat16") == 0
    assert tower_bytes(served | {"vision_config": {"model_type": "siglip_vision_model"}}, "bfloat16") == 0
