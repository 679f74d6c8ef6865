"""Files of images from strangers (jswa/images/decode.py)."""

import subprocess
import sys
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from jswa.errors import ConfigError, InvalidImage
from jswa.images.decode import LIMITS, Limits, decode
from tests.parity.patches.load import files
from tests.support.attacks.images import file_of, image_of, lying, moving

FIELD = "messages[0].content[1].image_url"
FORMS = ["png", "jpeg", "webp", "gif", "bmp"]
FILES = files()
TURNED = {  # by EXIF's number: how the stored pixels become those that are shown
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


def refusal(data: bytes, limits: Limits = LIMITS) -> str:
    """Why a file is refused."""
    with pytest.raises(InvalidImage) as caught:
        decode(data, FIELD, limits)
    assert caught.value.field == FIELD
    return str(caught.value)


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a pixel is decoded."""

    def load(image: ImageFile.ImageFile) -> None:
        raise AssertionError("a pixel is decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("name", FILES)
def test_every_mode_becomes_the_rgb_of_transformers(name: str) -> None:
    """What is transparent is white."""
    data, rgb = FILES[name]
    image = decode(data, FIELD)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), rgb)


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(decode(file_of(image), FIELD)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("number", TURNED)
@pytest.mark.parametrize("form", ["png", "webp", "jpeg"])
def test_images_are_the_right_way_up(form: str, number: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = number
    options = {"lossless": True} if form == "webp" else {}
    stored = decode(file_of(image_of(21, 13), form, **options), FIELD)
    shown = decode(file_of(image_of(21, 13), form, exif=exif, **options), FIELD)
    assert np.array_equal(np.asarray(shown), TURNED[number](np.asarray(stored)))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x00" * 100, b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"\xff\xd8"),
        *(
            b"%!PS-Adobe-3.0 EPSF-3.0",
            b"II*\x00",
            b"RIFF\x10\x00\x00\x00AVI LIST",
            b"8BPS",
            b"\x00\x00\x01\x00\x01\x00",
        ),
        file_of(image_of(5, 5), "tiff"),
        b" " + file_of(image_of(5, 5)),
    ],
)
def test_other_formats_are_refused(data: bytes) -> None:
    assert refusal(data).endswith(f"'{len(data)} bytes': must be a JPEG, PNG, WebP, GIF or BMP image")


@pytest.mark.parametrize(
    "data", [b"GIF89a/*", b"BMI is the body mass index", b"\xff\xd8\xff<?php", b"RIFF1234WEBPVP8 "]
)
def test_a_text_that_begins_as_an_image_is_refused(data: bytes) -> None:
    assert "cannot be decoded: " in refusal(data + b"=1;alert(1)" * 20) or "must have" in refusal(data)


@pytest.mark.parametrize("form", FORMS)
def test_what_follows_an_image_does_not_matter(form: str) -> None:
    """Such as an archive, or a program."""
    data = file_of(image_of(20, 10), form)
    followed = data + b"PK\x03\x04" + b"<script>" * 100
    assert np.array_equal(np.asarray(decode(followed, FIELD)), np.asarray(decode(data, FIELD)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("undecoded")
def test_a_header_with_many_pixels_is_refused_before_one_is_decoded(form: str) -> None:
    most = 16_383 if form == "webp" else 50_000
    assert "must have at most 67108864 pixels" in refusal(lying(form, most, most))
    sized = refusal(lying(form, 8_193, 8_192))
    assert sized.endswith(f"= '{form.upper()} of 8193 x 8192 pixels': must have at most 67108864 pixels")


@pytest.mark.parametrize("form", ["png", "bmp"])
@pytest.mark.usefixtures("undecoded")
def test_long_sides_are_refused(form: str) -> None:
    assert "of 3 x 65537 pixels': must have at most 65536 pixels each way" in refusal(lying(form, 3, 65_537))
    assert "must have at most 65536 pixels each way" in refusal(lying(form, 65_537, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(0, 10), (20, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(form: str, size: tuple[int, int]) -> None:
    assert "must have a pixel" in (found := refusal(lying(form, *size))) or "cannot be decoded: " in found


def test_limits_are_exact() -> None:
    data = file_of(image_of(30, 20))
    exact = Limits(len(data), 600, 30)
    assert decode(data, FIELD, exact).size == (30, 20)
    assert refusal(data, exact._replace(most_bytes=len(data) - 1)).endswith(f"must have at most {len(data) - 1} bytes")
    assert refusal(data, exact._replace(most_pixels=599)).endswith("must have at most 599 pixels")
    assert refusal(data, exact._replace(most_side=29)).endswith("must have at most 29 pixels each way")


@pytest.mark.parametrize("form", ["gif", "png", "webp"])
@pytest.mark.usefixtures("undecoded")
def test_animations_are_refused(form: str) -> None:
    assert refusal(moving(form, 3)).endswith(" of 20 x 10 pixels': must not be animated: send its frames as images")


@pytest.mark.parametrize("form", ["gif", "png", "webp"])
def test_an_animation_of_one_frame_is_an_image(form: str) -> None:
    assert decode(moving(form, 1), FIELD).size == (20, 10)


def test_of_several_pictures_in_a_jpeg_the_first_one_is_read() -> None:
    """As cameras with two lenses write them."""
    first, second = image_of(20, 10), Image.new("RGB", (20, 10), "red")
    both = file_of(first, "mpo", save_all=True, append_images=[second])
    assert np.array_equal(np.asarray(decode(both, FIELD)), np.asarray(decode(file_of(first, "jpeg"), FIELD)))


def test_a_text_in_a_png_that_explodes_is_refused() -> None:
    """Pillow bounds it."""
    data = file_of(image_of(20, 10))
    chunk = b"zTXtkey\x00\x00" + zlib.compress(bytes(2**24), 9)
    bomb = (len(chunk) - 4).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    assert "cannot be decoded: " in refusal(data[:33] + bomb + data[33:])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_a_file_that_is_cut_is_refused_or_whole(name: str, data: st.DataObject) -> None:
    """If what is cut off has no pixels, it is whole."""
    file, rgb = FILES[name]
    size = data.draw(st.integers(0, len(file) - 1))
    with suppress(InvalidImage):
        assert np.array_equal(np.asarray(decode(file[:size], FIELD)), rgb)
        assert len(file) - size <= 24, "some pixels are missing"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=6))
def test_a_damaged_file_is_refused_or_an_image_within_the_limits(name: str, damages: list[tuple[float, int]]) -> None:
    file = bytearray(FILES[name][0])
    for place, value in damages:
        file[int(place * len(file))] = value
    with warnings.catch_warnings(), suppress(InvalidImage):
        warnings.simplefilter("ignore")
        image = decode(bytes(file), FIELD, Limits(most_pixels=2**16))
        assert image.mode == "RGB"
        assert 0 < image.width * image.height <= 2**16


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.BmpImagePlugin", None)
    with pytest.raises(ConfigError, match=r"need Pillow: pip install \"\.\[images\]\""):
        decode(file_of(image_of(5, 5)), FIELD)


def test_to_import_the_room_imports_no_pillow() -> None:
    """It is optional."""
    program = """
import sys, jswa.images.decode, jswa.images.prepare, jswa.images.tokens
assert not [name for name in sys.modules if name.partition(".")[0] in ("PIL", "jax")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
