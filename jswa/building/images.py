"""The part of an engine that reads images: the tower of its checkpoint, and what makes prompts of pictures for it."""

import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jswa.config import EngineConfig
from jswa.errors import CheckpointError
from jswa.images.picture import Picture, geometry_of
from jswa.images.tokens import ImageInput
from jswa.model.hf.quantization import read_config
from jswa.model.vision.config import image_tokens_of, pad_token_of, vision_config_of
from jswa.model.vision.encoder import ImageEncoder
from jswa.model.vision.weights import has_tower, load_tower
from jswa.storage.json_object import read_optional

_log = logging.getLogger("jswa")
_CACHE_BYTES = 2**28  # of rows on the host: about 190 images of Gemma 4 E4B


class Sight:
    """Reads images in any thread, beside the steps, and remembers what it has read lately.

    Attributes:
        images: what makes prompts of images.
        encoder: the tower and its cache.
    """

    def __init__(self, images: ImageInput, encoder: ImageEncoder) -> None:
        self.images, self.encoder = images, encoder

    def encode(self, picture: Picture, salt: str) -> Shaped[np.ndarray, "n M"]:
        """Return the rows of an image's soft tokens, read-only, in the type of the activations."""
        return self.encoder.encode(picture, salt)


def open_sight(folder: Path, options: EngineConfig, dtype: jnp.dtype) -> Sight | None:
    """Load the tower of a checkpoint, and compile its program; None, with a line in the log, if it reads no images.

    The tower is on the first device. A checkpoint whose tower jswa does not serve still runs as a model of text.

    Raises CheckpointError if the tower is one that jswa serves, and its tensors are not as they must be.
    """
    config = read_config(folder)
    if not config.get("vision_config") or options.language_model_only or options.load_format == "dummy":
        return None
    processor = read_optional(folder / "processor_config.json") or read_optional(folder / "preprocessor_config.json")
    try:
        vision = vision_config_of(config)
        images = ImageInput(geometry_of(processor or None, config["vision_config"]), image_tokens_of(config))
        if pad_token_of(config) != 0:
            raise CheckpointError("config.json: text_config: pad_token_id must be 0")
    except CheckpointError as error:
        _log.warning("the model runs on text only, and refuses images: %s", error)
        return None
    if vision is None:
        return None
    if not has_tower(folder):
        _log.warning("the model runs on text only, and refuses images: the checkpoint has no tower (vision_tower)")
        return None
    params = load_tower(folder, vision, dtype)
    encoder = ImageEncoder(vision, params, most_tokens=images.geometry.most_tokens, most_bytes=_CACHE_BYTES)
    return Sight(images, encoder)
