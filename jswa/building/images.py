"""The part of an engine that reads images: the tower of its checkpoint, and what makes prompts of pictures for it."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jswa.config import EngineConfig
from jswa.errors import CheckpointError, ModelError
from jswa.images.picture import geometry_of
from jswa.images.tokens import ImageInput
from jswa.model.binding import shapes_of
from jswa.model.hf.quantization import read_config
from jswa.model.vision.config import image_tokens_of, pad_token_of, vision_config_of
from jswa.model.vision.encoder import ImageEncoder, Sight
from jswa.model.vision.gemma4 import Tower
from jswa.model.vision.weights import has_tower, load_tower
from jswa.storage.json_object import read_optional

_log = logging.getLogger("jswa")
_CACHE_BYTES = 2**28  # of rows on the host: about 190 images of Gemma 4 E4B


def tower_bytes(config_json: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of the vision tower that config.json describes; 0 if the model runs on text only."""
    try:
        vision = vision_config_of(config_json)
    except ModelError:  # `open_sight` says why, and leaves the tower out
        return 0
    if vision is None:
        return 0
    held = jnp.dtype(dtype)
    size: int = held.itemsize * sum(math.prod(one.shape) for one in shapes_of(lambda: Tower(vision, held)).values())
    return size


def open_sight(folder: Path, options: EngineConfig, dtype: jnp.dtype) -> Sight | None:
    """Load the tower of a checkpoint, and compile its program; None, with a line in the log, if it reads no images.

    The tower is on the first device. A checkpoint whose tower jswa does not serve still runs as a model of text.

    Raises CheckpointError if the tower is one that jswa serves, and its tensors are not as they must be.
    """
    config = read_config(folder)
    if options.language_model_only or options.load_format == "dummy":
        return None
    try:
        vision = vision_config_of(config)
        if vision is None:
            return None
        files = [read_optional(folder / name) for name in ("processor_config.json", "preprocessor_config.json")]
        images = ImageInput(geometry_of(files[0] or files[1], config["vision_config"]), image_tokens_of(config))
        if pad_token_of(config) != 0:
            raise CheckpointError("config.json: text_config: pad_token_id must be 0")
    except ModelError as error:
        _log.warning("the model runs on text only, and refuses images: %s", error)
        return None
    if not has_tower(folder):
        _log.warning("the model runs on text only, and refuses images: the checkpoint has no tower (vision_tower)")
        return None
    params = load_tower(folder, vision, dtype)
    encoder = ImageEncoder(vision, params, most_tokens=images.geometry.most_tokens, most_bytes=_CACHE_BYTES)
    return Sight(images, encoder)
