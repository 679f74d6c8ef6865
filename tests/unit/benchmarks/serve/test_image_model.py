"""The model that reads images for load on a server."""

from pathlib import Path

import jax.numpy as jnp

from benchmarks.serve.image_model import write_image_model
from jswa.building.images import tower_bytes
from jswa.model.hf.quantization import read_config
from jswa.model.vision.config import image_tokens_of, vision_config_of
from jswa.model.vision.weights import load_tower
from jswa.model.weights.load import load_checkpoint
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer


def test_its_weights_tower_and_tokens_are_those_of_its_config(tmp_path: Path) -> None:
    """The template writes the token of an image, which the tokenizer knows."""
    folder = write_image_model(tmp_path / "model")
    config, dtype = read_config(folder), jnp.dtype("float32")
    vision = vision_config_of(config)
    assert vision is not None
    assert sum(value.nbytes for value in load_tower(folder, vision, dtype).values()) == tower_bytes(config, "float32")
    model, params = load_checkpoint(folder, dtype)
    assert params
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert tokenizer is not None
    assert template is not None
    prompt = template.prompt(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    )
    ids = tokenizer.encode(prompt).tolist()
    assert image_tokens_of(config).image in ids
    assert max(ids) < model.vocab_size
