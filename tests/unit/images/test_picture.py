"""Pictures, and what a checkpoint says of them (jswa/images/picture.py)."""

from typing import Any

import numpy as np
import pytest

from jswa.errors import CheckpointError
from jswa.images.picture import Geometry, geometry_of, picture_of

RELEASED = {  # of google/gemma-4-E2B-it
    "image_processor": {
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_processor_type": "Gemma4ImageProcessor",
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": 280,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
    },
    "processor_class": "Gemma4Processor",
}


def digest(columns: int, geometry: Geometry = Geometry(), value: int = 0) -> bytes:  # noqa: B008 - it never changes
    """The digest of 36 patches of one colour."""
    return picture_of(np.full((36, 768), value, np.uint8), columns, geometry).digest


def test_digests_differ_with_the_pixels_and_their_places() -> None:
    found = {digest(6), digest(12), digest(3), digest(6, value=1), digest(6, Geometry(pooling=2))}
    assert len(found) == 5
    assert {len(one) for one in found} == {32}
    assert digest(6) == digest(6, Geometry(most_tokens=70))


def test_a_digest_is_that_of_earlier_versions() -> None:
    """Saved caches have the ids that are made of it."""
    assert digest(6).hex() == "fa45668a1eae355c9fe613a44363ef1fe0ae3cf6f4f9c951f8040593cddc54cd"


def test_what_is_released_is_the_default() -> None:
    """As processor_config.json, as preprocessor_config.json, and where there is neither."""
    vision = {"patch_size": 16, "pooling_kernel_size": 3}
    assert geometry_of(RELEASED, vision) == geometry_of(RELEASED["image_processor"], {}) == Geometry()  # type: ignore[arg-type]
    assert geometry_of(None, vision) == geometry_of({"processor_class": "Gemma4Processor"}, {}) == Geometry()


def test_a_checkpoint_may_cut_images_otherwise() -> None:
    said = {"patch_size": 14, "pooling_kernel_size": 2, "max_soft_tokens": 1_120}
    assert geometry_of(said, {"patch_size": 14, "pooling_kernel_size": 2}) == Geometry(14, 2, 1_120)
    assert geometry_of({}, {"patch_size": 14, "pooling_kernel_size": 2}) == Geometry(14, 2, 280)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_resize", False),
        ("do_rescale", False),
        ("do_convert_rgb", False),
        ("do_normalize", True),
        ("resample", 2),
        ("rescale_factor", 1 / 127.5),
        ("rescale_factor", "1/255"),
        ("max_soft_tokens", 281),
        ("max_soft_tokens", [280]),
        ("patch_size", 0),
        ("patch_size", 129),
        ("patch_size", 16.0),
        ("patch_size", None),
        ("pooling_kernel_size", True),
        ("pooling_kernel_size", 17),
        ("patch_size", 14),
        ("image_processor_type", "SiglipImageProcessor"),
    ],
)
def test_what_is_not_done_here_is_refused(field: str, value: Any) -> None:
    """A size that the tower does not have is refused too."""
    said = {**RELEASED["image_processor"], field: value}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=f"^{field} = "):
        geometry_of({"image_processor": said}, {"patch_size": 16, "pooling_kernel_size": 3})


@pytest.mark.parametrize("value", [[], "Gemma4ImageProcessor", 3, None])
def test_an_image_processor_is_an_object(value: Any) -> None:
    with pytest.raises(CheckpointError, match="image_processor must be an object"):
        geometry_of({"image_processor": value}, {})
