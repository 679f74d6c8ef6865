"""Random damage to checkpoints gives a typed error that names the file, or the values that the files have."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from jswa.errors import CheckpointError
from jswa.model.hf.tensor_map import canonical_name
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_header import BITS, read_header
from tests.support.checkpoints.hostile import FILE, INDEX, Header, pack, unpack, write_valid

SHARDS = tuple(f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))
Edit = Callable[[Header], object]


class Checkpoint:
    """A valid checkpoint that is restored after each damage."""

    def __init__(self, folder: Path, *, shards: int = 1) -> None:
        write_valid(folder, shards=shards)
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.header, self.data = unpack(folder / FILE) if shards == 1 else ({}, b"")

    def restore(self) -> None:
        """Restore every file and remove all others."""
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Write a checkpoint of one file."""
    return Checkpoint(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Write a checkpoint of three shards and an index."""
    return Checkpoint(tmp_path_factory.mktemp("three"), shards=3)


def error_or_values(folder: Path, *named: str) -> None:
    """Assert that loading fails with a short error that has one of these names, or gives the library's values."""
    try:
        params = load_checkpoint(folder, jnp.dtype("float32"))[1]
    except CheckpointError as error:
        message = str(error)
        event("refused")
        assert len(message) < 2000
        assert any(name in message for name in (*named, "lacks", "does not use"))
        return
    stored: dict[str, Any] = {}
    for path in [folder / FILE] if (folder / FILE).exists() else list(folder.glob("*-of-*")):
        stored |= {str(canonical_name(key)): value for key, value in load_file(path).items()}
    matrices = {
        "lm_head": ["lm_head"],
        "layers.0.attention.qkv": [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"],
        "layers.0.attention.out": ["model.layers.0.self_attn.o_proj"],
        "layers.0.mlp.gate_up": [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up")],
        "layers.0.mlp.down": ["model.layers.0.mlp.down_proj"],
    }
    for ours, theirs in matrices.items():
        rows = np.concatenate([stored[f"{name}.weight"].astype(np.float32) for name in theirs])
        np.testing.assert_array_equal(params[ours], rows.T)
    for ours, name in {"embed": "model.embed_tokens", "final_norm.weight": "model.norm"}.items():
        np.testing.assert_array_equal(params[ours], stored[f"{name}.weight"].astype(np.float32))


def library_agrees(path: Path) -> None:
    """Assert that the safetensors library accepts a header that our check accepts, and reads the same."""
    try:
        header = read_header(path)
    except CheckpointError:
        return
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == header.keys()
        for key, stored in header.items():
            info = file.get_slice(key)
            assert (info.get_dtype(), tuple(info.get_shape())) == (stored.dtype, stored.shape)


KEYS = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
]
FIELDS = ["dtype", "shape", "data_offsets"]
NUMBERS = st.sampled_from([0, 1, -1, 8, 32, 64, 96, 256, 172_544, 172_800, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 1.0, 64.5, float("nan"), float("inf"), "x", "", "64", [], {}, [[]], [{}]]
)
VALUES = (
    st.lists(NUMBERS | st.integers(0, 180_000), max_size=4)
    | st.lists(NUMBERS | ODD, max_size=3)
    | st.sampled_from([*BITS, "f32", "F128"])
    | ODD
)


@st.composite
def header_edits(draw: st.DrawFn) -> Edit:
    """Draw one change: a field is set or copied, or a tensor is dropped, added, renamed or exchanged."""
    key, other, field = draw(st.sampled_from(KEYS)), draw(st.sampled_from(KEYS)), draw(st.sampled_from(FIELDS))
    value = draw(VALUES)

    def copy(header: Header) -> None:
        if isinstance(header.get(key), dict) and isinstance(header.get(other), dict):
            header[key][field] = header[other].get(field)

    def exchange(header: Header) -> None:
        header[key], header[other] = header.get(other), header.get(key)

    def put(header: Header) -> None:
        header[key] = {**header[key], field: value} if isinstance(header.get(key), dict) else value

    changes: list[Edit] = [
        put,
        copy,
        exchange,
        lambda header: header.pop(key, None),
        lambda header: header.update({key: value}),
        lambda header: header.update({f"language_model.{key}": header.get(other)}),
        lambda header: header.update({"__metadata__": value}),
    ]
    return draw(st.sampled_from(changes))


@given(st.lists(header_edits(), min_size=1, max_size=3), st.integers(-300, 300), st.booleans())
def test_a_random_header_gives_an_error_or_the_values(
    one: Checkpoint, edits: list[Edit], more: int, resize: bool
) -> None:
    """Types, shapes, offsets and names change, and the file is truncated or extended."""
    header = json.loads(json.dumps(one.header))
    for change in edits:
        change(header)
    data = one.data if not resize else one.data[: len(one.data) + min(more, 0)] + bytes(max(more, 0))
    pack(one.folder / FILE, header, data)
    library_agrees(one.folder / FILE)
    error_or_values(one.folder, FILE)


@settings(max_examples=40)
@given(st.permutations(KEYS), st.sampled_from(["F64", "F32", "F16", "BF16"]), st.integers(0, 20))
def test_any_order_of_tensors_and_any_padding_is_valid(one: Checkpoint, order: list[str], dtype: str, pad: int) -> None:
    """Names and bytes are in any order, in every floating-point type."""
    header: Header = {}
    data = b""
    for key in dict.fromkeys([*order, *sorted(one.header)]):
        if key == "__metadata__":
            continue
        shape = one.header[key]["shape"]
        size = int(np.prod(shape)) * BITS[dtype] // 8
        header[key] = {"shape": shape, "data_offsets": [len(data), len(data) + size], "dtype": dtype}
        data += bytes(size)
    text = json.dumps(dict(sorted(header.items(), reverse=True)), indent=pad or None).encode() + b" " * pad
    pack(one.folder / FILE, text, data)
    assert not load_checkpoint(one.folder, jnp.dtype("float32"))[1]["embed"].any()


@st.composite
def byte_edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Draw one change of bytes, mostly near the header: set, drop or insert some, or truncate the file."""
    at = draw(st.integers(0, 1400) | st.integers(0, 175_000))
    count = draw(st.integers(1, 40))
    piece = draw(
        st.binary(min_size=1, max_size=8) | st.sampled_from([b'"', b"{", b"]}", b"[0,", b'{"":', b"\\u", b"\xff"])
    )
    changes: list[Callable[[bytes], bytes]] = [
        lambda content: content[:at] + piece[:1] + content[at + 1 :],
        lambda content: content[:at] + content[at + count :],
        lambda content: content[:at] + piece + content[at:],
        lambda content: content[:at],
        lambda content: struct.pack("<Q", at) + content[8:],
        lambda content: (int.from_bytes(content[:8], "little") + count & 2**64 - 1).to_bytes(8, "little") + content[8:],
    ]
    return draw(st.sampled_from(changes))


@given(st.lists(byte_edits(), min_size=1, max_size=3))
def test_random_bytes_give_an_error_or_the_values(one: Checkpoint, edits: list[Callable[[bytes], bytes]]) -> None:
    """Several changes are applied in sequence."""
    content = one.files[FILE]
    for change in edits:
        content = change(content)
    (one.folder / FILE).write_bytes(content)
    library_agrees(one.folder / FILE)
    error_or_values(one.folder, FILE)


@example(b"{}", True, 0)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 2**64 - 1) | st.integers(0, 250))
def test_a_file_of_noise_is_an_error(one: Checkpoint, noise: bytes, counted: bool, length: int) -> None:
    """This holds even if the header length fits."""
    content = struct.pack("<Q", len(noise) if counted else length) + noise
    (one.folder / FILE).write_bytes(content)
    library_agrees(one.folder / FILE)
    with pytest.raises(CheckpointError, match=f"{FILE}|lacks"):  # {} is a file without tensors
        load_checkpoint(one.folder, jnp.dtype("float32"))


@st.composite
def folder_edits(draw: st.DrawFn) -> Callable[[Path], object]:
    """Draw one change of the files of a sharded checkpoint, or of its index."""
    file, other = draw(st.sampled_from(SHARDS)), draw(st.sampled_from(SHARDS))
    key = draw(st.sampled_from([*KEYS, "model.norm.bias", "vision_tower.x"]))
    name = draw(st.sampled_from([*SHARDS, INDEX, "config.json", "..", "", f"./{file}", f"/{file}", "\x00"]) | st.text())
    size = draw(st.integers(0, 60_000))

    def reindex(path: Path, change: Callable[[dict[str, str]], object]) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    def copy(path: Path) -> None:
        (path / other).write_bytes((path / file).read_bytes())

    def exchange(path: Path) -> None:
        ours, theirs = (path / file).read_bytes(), (path / other).read_bytes()
        (path / file).write_bytes(theirs)
        (path / other).write_bytes(ours)

    def link(path: Path) -> None:
        (path / other).unlink()
        (path / other).symlink_to(file)  # to itself, if both are the same file

    changes: list[Callable[[Path], object]] = [
        copy,
        exchange,
        link,
        lambda path: (path / file).unlink(),
        lambda path: (path / file).write_bytes((path / file).read_bytes()[:size]),
        lambda path: reindex(path, lambda weight_map: weight_map.pop(key, None)),
        lambda path: reindex(path, lambda weight_map: weight_map.update({key: name})),
        lambda path: (path / INDEX).write_bytes((path / INDEX).read_bytes()[: size // 40]),
    ]
    return draw(st.sampled_from(changes))


@given(st.lists(folder_edits(), min_size=1, max_size=2))
def test_random_shards_give_an_error_or_the_values(three: Checkpoint, edits: list[Callable[[Path], object]]) -> None:
    """Shards are missing, copied, exchanged, truncated or linked, and the index disagrees."""
    three.restore()
    try:
        for change in edits:
            change(three.folder)
    except (OSError, ValueError):
        pass  # the first change removed a file that the second one needs
    error_or_values(three.folder, INDEX, "config.json", *SHARDS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(SHARDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON) | JSON, st.booleans())
def test_a_random_index_gives_an_error_or_the_values(three: Checkpoint, value: object, twice: bool) -> None:
    """The index is any JSON value, or has all keys twice."""
    three.restore()
    text = json.dumps(value)
    if twice and text.startswith("{") and len(text) > 2:
        text = f"{text[:-1]}, {text[1:]}"
    (three.folder / INDEX).write_text(text)
    error_or_values(three.folder, INDEX, "config.json", *SHARDS)


def test_the_library_refuses_gaps_overlaps_and_truncation(one: Checkpoint) -> None:
    """The other tests rely on the library as an oracle."""
    changes: list[Edit] = [
        lambda header: header["model.norm.weight"].update(data_offsets=[0, 256]),
        lambda header: header.pop("model.norm.weight"),
        lambda header: header["model.norm.weight"].update(dtype="F16"),
    ]
    for change in changes:
        header = json.loads(json.dumps(one.header))
        change(header)
        pack(one.folder / FILE, header, one.data)
        with pytest.raises(SafetensorError), safe_open(one.folder / FILE, framework="numpy"):
            pass
