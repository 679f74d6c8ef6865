"""A fake engine that reads images, a vocabulary with their tokens, and files of images."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from jswa.images.picture import Geometry
from jswa.images.tokens import ImageInput, ImageTokens
from jswa.text.tokenizer import Tokenizer
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES

TOKENS = ImageTokens(image=259, begin=260, end=261)
GEOMETRY = Geometry(patch=16, pooling=3, most_tokens=4)
# In the style of Gemma's: a turn for each message, whose parts follow each other.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def seeing() -> FakeEngine:
    """Return an engine that reads images of at most four tokens."""
    engine = FakeEngine(max_model_len=4_096)
    engine.model.vocab_size = 262
    engine.images = ImageInput(GEOMETRY, TOKENS)
    return engine


def tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and those of images."""
    found = Tokenizer.load(BYTES)
    assert found is not None
    found.backend.add_special_tokens(["<|image|>", "<|image>", "<image|>"])
    assert [found.backend.token_to_id(one) for one in ("<|image|>", "<|image>", "<image|>")] == list(TOKENS)
    return found


def file_of(colour: int = 0, kind: str = "PNG", size: tuple[int, int] = (96, 96), **how: Any) -> bytes:
    """Return the file of an image of one colour."""
    file = BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), colour, np.uint8)).save(file, kind, **how)
    return file.getvalue()


def url_of(file: bytes, kind: str = "png") -> str:
    """Return a file as a data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def image(colour: int = 0, **how: Any) -> dict[str, Any]:
    """Return a part of a chat with an image of one colour."""
    return {"type": "image_url", "image_url": {"url": url_of(file_of(colour, **how))}}


def text(value: str) -> dict[str, Any]:
    """Return a part of a chat with a text."""
    return {"type": "text", "text": value}
