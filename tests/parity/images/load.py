"""The fixtures of images: tiny checkpoints of Gemma 4 with a vision tower, images, prompts, and what both come to.

Weights and images are drawn, not stored (../weights.py); soft tokens, greedy tokens and logits are stored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.parity.archive import Facts, digest, read_arrays, read_facts
from tests.parity.weights import Tensor

ARCHIVE = Path(__file__).parent / "images"
MOST_TOKENS, GREEDY = 20, 8
POOLING, PATCH = 3, 16
# Patches across and down. The last image has more soft tokens than there are keys in a window.
GRIDS = ((3, 3), (6, 3), (3, 9), (15, 12))
# The images of each prompt; `PLACES` has the number of text tokens before each image, and behind the last.
PROMPTS: dict[str, tuple[int, ...]] = {"text": (), "one": (1,), "three": (2, 0, 1), "long": (3,)}
PLACES: dict[str, tuple[int, ...]] = {"text": (12,), "one": (5, 5), "three": (3, 0, 2, 4), "long": (4, 6)}
FIRST_TEXT = 3  # lower ids are special


class DrawnPicture(NamedTuple):
    """An image as the tower reads it: patches in rows of the grid from the top left, and their positions."""

    patches: NDArray[np.uint8]  # [N, P]
    positions: NDArray[np.int32]  # [N, 2]
    tokens: int
    digest: bytes


class Prompt(NamedTuple):
    """A prompt, and what transformers computes for it.

    Attributes:
        images: the pictures whose soft tokens take the place of the image tokens, in their order.
        ids: the prompt with an image token for each soft token, then greedy tokens.
        length: tokens of the prompt.
        logits: of one forward pass over `ids`.
    """

    images: tuple[DrawnPicture, ...]
    ids: NDArray[np.int32]  # [T]
    length: int
    logits: NDArray[np.float32]  # [T, V]


@dataclass(frozen=True)
class ImageFixture:
    """A checkpoint with a vision tower.

    Attributes:
        config: config.json.
        tensors: by names on disk.
        pictures: the images of `GRIDS`.
        soft_tokens: of each picture.
        prompts: by their names in `PROMPTS`.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    pictures: tuple[DrawnPicture, ...]
    soft_tokens: tuple[NDArray[np.float32], ...]  # [S, M] each
    prompts: dict[str, Prompt]


def names() -> list[str]:
    """Return the names of all fixtures, sorted."""
    return sorted(read_facts(ARCHIVE))


def load_images(name: str) -> ImageFixture:
    """Read one fixture. Raise RuntimeError if this NumPy draws other numbers than the fixture was made with."""
    every = read_facts(ARCHIVE)
    recipe, arrays = read_arrays(ARCHIVE, list(every).index(name))
    facts = every[name]
    tensors, pictures = recipe.draw(facts), drawn_pictures(facts["seed"])
    if all_digest(tensors, pictures) != facts["digest"]:
        raise RuntimeError(f"{name}: NumPy {np.__version__} draws other numbers ({facts['made_with']}): `make parity`")
    soft = np.split(arrays["soft_tokens"], np.cumsum([one.tokens for one in pictures])[:-1])
    return ImageFixture(name, facts["config"], tensors, pictures, tuple(soft), _prompts(facts, pictures, arrays))


def _prompts(facts: Facts, pictures: tuple[DrawnPicture, ...], arrays: dict[str, Any]) -> dict[str, Prompt]:
    prompts, begin = {}, 0
    for name, images in PROMPTS.items():
        length = len(drawn_prompt(name, facts["seed"], facts["config"]))
        rows = slice(begin, begin + length + GREEDY)
        begin = rows.stop
        its = tuple(pictures[image] for image in images)
        prompts[name] = Prompt(its, arrays["ids"][rows], length, arrays["logits"][rows])
    return prompts


def drawn_pictures(seed: int) -> tuple[DrawnPicture, ...]:
    """Return an image of each grid, of random pixels that are the brighter the further down they are."""
    pictures = []
    for number, (across, down) in enumerate(GRIDS):
        y, x = np.divmod(np.arange(across * down), across)
        noise = np.random.default_rng([seed, number, 5]).integers(0, 192, (across * down, 3 * PATCH**2))
        patches = (noise + 64 * y[:, None] // down).astype(np.uint8)
        positions = np.stack([x, y], axis=1).astype(np.int32)
        pictures.append(DrawnPicture(patches, positions, len(patches) // POOLING**2, bytes([number])))
    return tuple(pictures)


def drawn_prompt(name: str, seed: int, config: dict[str, Any]) -> list[int]:
    """Return the token ids of a prompt."""
    rng = np.random.default_rng([seed, list(PROMPTS).index(name), 6])
    text = [rng.integers(FIRST_TEXT, config["boi_token_id"], count).tolist() for count in PLACES[name]]
    ids: list[int] = text[0]
    for image, behind in zip(PROMPTS[name], text[1:], strict=True):
        across, down = GRIDS[image]
        soft = [config["image_token_id"]] * (across * down // POOLING**2)
        ids = [*ids, config["boi_token_id"], *soft, config["eoi_token_id"], *behind]
    return ids


def all_digest(tensors: dict[str, Tensor], pictures: tuple[DrawnPicture, ...]) -> str:
    """Return a digest of all that is drawn."""
    drawn: dict[str, Any] = {f"picture {n}": one.patches for n, one in enumerate(pictures)}
    return digest(drawn | tensors)
