"""Malicious weight files are refused with file, key, value and limit before a tensor is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jswa.errors import CheckpointError
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_header import BITS, read_header
from jswa.storage.json_object import MAX_BYTES, MAX_VALUES, parse_object, read_object
from tests.support.checkpoints.hostile import (
    EMBED,
    FILE,
    INDEX,
    NORM,
    Header,
    edit,
    edit_json,
    loaded_within_limits,
    pack,
    unpack,
    weight_bombs,
    write_valid,
)

FLOAT32 = jnp.dtype("float32")
SIZE = 172_800  # bytes after the header of the valid file; the norm has the last 256
ONE, TWO, THREE = (f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a valid checkpoint in one file."""
    write_valid(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Write a valid checkpoint in three shards."""
    write_valid(tmp_path, shards=3)
    return tmp_path


def refusal(folder: Path) -> str:
    """Return the loader's error, and assert that it reads no tensor."""
    with (
        mock.patch(
            "jswa.model.weights.safetensors_files.TensorReader.rows",
            side_effect=AssertionError("a tensor would be read"),
        ),
        pytest.raises(CheckpointError) as caught,
    ):
        load_checkpoint(folder, FLOAT32)
    return str(caught.value)


def put(key: str, **fields: Any) -> Callable[[Header], object]:
    """Return a change of fields of a header entry."""
    return lambda header: header[key].update(fields)


def entry(key: str, value: Any) -> Callable[[Header], object]:
    """Return the addition of a header entry."""
    return lambda header: header.update({key: value})


NOT_ENTRIES: list[Any] = [None, 3, "F32", [], {}, [["dtype", "F32"]]]
NOT_SHAPES: list[Any] = [
    None,
    96,
    "96",
    [96.0, 64],
    [True, 64],
    [96, None],
    [[96, 64]],
    [-96, -64],
    [2**63],
    [2**40] * 3,
]
NOT_OFFSETS: list[Any] = [None, 0, "0", [], [0], [0, 1, 2], [0.0, 256.0], [False, True], [None, 256], ["0", "256"]]
CASES: list[tuple[Callable[[Header], object], str, str]] = [
    *((entry(NORM, x), NORM, "must be an object of dtype, shape and data_offsets") for x in NOT_ENTRIES),
    (lambda h: h[NORM].pop("dtype"), NORM, "must be an object of dtype, shape and data_offsets"),
    (put(NORM, extra=1), NORM, "must be an object of dtype, shape and data_offsets"),
    *((put(NORM, dtype=x), NORM, f"dtype = {x!r}: must be one of BF16") for x in ("f32", "F31", "", None, 3, ["F32"])),
    *((put(NORM, shape=x), NORM, "shape = ") for x in NOT_SHAPES),
    (put(NORM, shape=[0, 2**62, 2**62]), NORM, "must be at most 32 whole numbers from 0, of less than 2^63 bits"),
    (put(NORM, shape=[64] + [1] * 32), NORM, "must be at most 32 whole numbers"),
    (put(NORM, shape=[9**999] * 9), NORM, "must be at most 32 whole numbers"),
    *((put(NORM, data_offsets=x), NORM, "must be two whole numbers") for x in NOT_OFFSETS),
    (put(NORM, data_offsets=[SIZE, SIZE - 256]), NORM, f"[{SIZE}, {SIZE - 256}]: must rise from 0 to at most {SIZE}"),
    (put(NORM, data_offsets=[-256, 0]), NORM, f"data_offsets = [-256, 0]: must rise from 0 to at most {SIZE}"),
    (put(NORM, data_offsets=[SIZE, SIZE + 256]), NORM, f"must rise from 0 to at most {SIZE}"),
    (put(NORM, data_offsets=[2**64, 2**64 + 256]), NORM, f"must rise from 0 to at most {SIZE}"),
    (put(NORM, shape=[63]), NORM, "must span 2016 / 8 bytes, the size of F32 [63]"),
    (put(NORM, dtype="F16"), NORM, "must span 1024 / 8 bytes, the size of F16 [64]"),
    (put(NORM, dtype="F6_E2M3", shape=[341]), NORM, "must span 2046 / 8 bytes"),
    (put(NORM, shape=[0]), NORM, "must span 0 / 8 bytes"),
    (put(NORM, shape=[]), NORM, "must span 32 / 8 bytes, the size of F32 []"),
    (put(NORM, data_offsets=[0, 256]), "lm_head.weight", f"overlap those of {NORM}: must begin at 256"),
    (lambda h: h.pop(NORM), "model.layers.0.self_attn.v_proj.weight", "256 bytes follow"),
    (lambda h: h.pop(EMBED), "model.layers.0.input_layernorm.weight", "leave a gap after those of lm_head.weight"),
    (lambda h: h.pop("lm_head.weight"), EMBED, "leave a gap after those of the header: must begin at 0"),
    (entry("empty", {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}), "empty", "overlap those of lm_head"),
    (entry("__metadata__", ["pt"]), "__metadata__", "must be an object of strings"),
    (entry("__metadata__", {"format": 3}), "__metadata__", "must be an object of strings"),
]


@pytest.mark.parametrize(("change", "key", "expected"), CASES)
def test_the_error_names_an_invalid_header_entry(
    folder: Path, change: Callable[[Header], object], key: str, expected: str
) -> None:
    """The error has file, key, value and limit."""
    edit(folder / FILE, change)
    message = refusal(folder)
    assert message.startswith(f"{FILE} is not a readable safetensors file: ")
    assert key in message
    assert expected in message


def test_a_wrong_shape_or_type_is_refused_before_any_tensor_is_read(folder: Path) -> None:
    """This includes the last tensor in the order of loading, and files that are valid by themselves."""
    tensors = load_file(folder / FILE)
    for key in tensors:
        for other in (tensors[key].reshape(-1, 2), tensors[key].astype(np.int32), tensors[key][:0]):
            save_file(tensors | {key: other}, folder / FILE)
            assert f"{FILE}: {key} has " in refusal(folder)


@pytest.mark.parametrize("layer", ["9" * 5000, "1", "²", "٣", "-1", "0x0", "00", ""])
def test_a_tensor_of_a_layer_that_does_not_exist_is_refused(folder: Path, layer: str) -> None:
    """Layer numbers may have more than 4,300 digits, which int() refuses, or digits of other scripts."""
    save_file(load_file(folder / FILE) | {f"model.layers.{layer}.x.weight": np.zeros(2, np.float32)}, folder / FILE)
    assert refusal(folder).startswith("the checkpoint has tensors that this model does not use: ")


def test_a_tensor_of_terabytes_is_refused_by_its_shape(folder: Path) -> None:
    """The header and the size of a sparse file may agree."""
    header, data = unpack(folder / FILE)
    header["huge"] = {"dtype": "F32", "shape": [2**34], "data_offsets": [SIZE, SIZE + 2**36]}
    pack(folder / FILE, header, data)
    os.truncate(folder / FILE, (folder / FILE).stat().st_size + 2**36)
    assert "does not use: huge" in refusal(folder)
    header["huge"], header[NORM] = header[NORM], header["huge"]
    del header["huge"]
    header[NORM]["data_offsets"] = [SIZE - 256, SIZE - 256 + 2**36]
    pack(folder / FILE, header, data[:-256])
    os.truncate(folder / FILE, (folder / FILE).stat().st_size + 2**36)
    assert refusal(folder) == f"{FILE}: {NORM} has shape [{2**34}], the config asks for [64]"


NOT_HEADERS = [
    (b"", "its header starts with b''"),
    (b"[]", "its header starts with b'[]'"),
    (b" {}", "its header starts with b' {}'"),
    (b"{", "its header cannot be read as JSON"),
    (b"{} {}", "its header cannot be read as JSON"),
    (b'{"\xff": 1}', "its header cannot be read as JSON: 'utf-8' codec"),
    (b'{"a": ' + b"[" * 100_000, "its header cannot be read as JSON: maximum recursion depth"),
    (b'{"a": ' + b'{"a":' * 100_000, "its header cannot be read as JSON: maximum recursion depth"),
    (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "a = [[[[...]]]]: must be an object"),
    (b'{"a": ' + b"9" * 5000 + b"}", "its header cannot be read as JSON: Exceeds the limit"),
    (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "its header: key dtype occurs twice"),
    (b'{"a": 1, "b": 2, "a": 3}', "its header: key a occurs twice"),
    (b'{"": 1, "": 3}', "its header: key '' occurs twice"),
    (b'{"a\\u0000b": 1}', r"'a\x00b' = 1: must be an object"),
    (b'{"' + b"a" * 10_000 + b'": 1}', "aaa...aaa"),
    (b'{"a": [' + b"[]," * MAX_VALUES + b"1]}", f"must have at most {MAX_VALUES}"),
    (b"{}", "172800 bytes follow the header: must be 0"),
]


@pytest.mark.parametrize(("header", "expected"), NOT_HEADERS)
def test_a_header_that_is_not_an_object_of_tensors_is_refused(folder: Path, header: bytes, expected: str) -> None:
    """Cases are strings, nesting, numbers and keys; error texts stay short."""
    pack(folder / FILE, header, unpack(folder / FILE)[1])
    message = refusal(folder)
    assert message.startswith(f"{FILE} is not a readable safetensors file: ")
    assert expected in message
    assert len(message) < 400


@pytest.mark.parametrize("length", [172_803, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused(folder: Path, length: int) -> None:
    """The loader never allocates that length."""
    pack(folder / FILE, b"{}", bytes(SIZE), length=length)
    assert refusal(folder).endswith(f"header length = {length}: must be at most 172802, the bytes after it")


def test_a_header_longer_than_the_format_allows_is_refused(folder: Path) -> None:
    """This holds even if the file is long enough."""
    pack(folder / FILE, b"{}", b"", length=MAX_BYTES + 1)
    os.truncate(folder / FILE, 3 * MAX_BYTES)
    assert refusal(folder).endswith(f"header length = {MAX_BYTES + 1}: must be at most {MAX_BYTES}")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    """The file ends at any byte of the header, or at the end or middle of a tensor; or it is a byte too long."""
    header, data = unpack(folder / FILE)
    content = (folder / FILE).read_bytes()
    start = len(content) - len(data)
    ends = {
        end
        for key, x in header.items()
        if key != "__metadata__"
        for end in (*x["data_offsets"], x["data_offsets"][0] + 2)
    }
    cuts = [*range(start), *(start + end for end in ends if end < SIZE)]
    for cut in cuts[::-1]:
        os.truncate(folder / FILE, cut)
        with pytest.raises(CheckpointError, match=f"^{FILE} is not a readable safetensors file: "):
            read_header(folder / FILE)
    (folder / FILE).write_bytes(content + b"x")
    assert f"1 bytes follow {NORM}: must be 0" in refusal(folder)
    (folder / FILE).write_bytes(content)
    assert read_header(folder / FILE).keys() == header.keys() - {"__metadata__"}


@pytest.mark.parametrize("dtype", BITS)
def test_headers_of_every_type_agree_with_the_library(tmp_path: Path, dtype: str) -> None:
    """Vision tensors may have any type; F4 and F6 tensors must fill whole bytes."""
    size = 2 * 8 * BITS[dtype] // 8
    header = {"a": {"dtype": dtype, "shape": [2, 8], "data_offsets": [0, size]}}
    pack(tmp_path / FILE, header, bytes(size))
    assert read_header(tmp_path / FILE)["a"] == (dtype, (2, 8), 0, size)
    with safe_open(tmp_path / FILE, framework="numpy") as file:
        assert file.get_slice("a").get_dtype() == dtype
    pack(tmp_path / FILE, header, bytes(size - 1))
    with pytest.raises(CheckpointError, match="a: data_offsets"):
        read_header(tmp_path / FILE)


def test_scalars_empty_tensors_and_padding_are_valid(tmp_path: Path) -> None:
    """Files may have no tensors, tensors without bytes, and headers padded with blanks."""
    tensors = {"a": np.zeros((), np.float32), "b": np.zeros((0, 5), np.float16), "c": np.zeros((2, 0), np.int8)}
    parts: list[dict[str, Any]] = [{}, tensors]
    for part in parts:
        save_file(part, tmp_path / FILE)
        assert {key: stored.shape for key, stored in read_header(tmp_path / FILE).items()} == {
            key: value.shape for key, value in part.items()
        }
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "__metadata__": {"a": "b", "c": "[{,"}}
    pack(tmp_path / FILE, json.dumps(header, indent=4).encode() + b" " * 13, b"abc")
    assert read_header(tmp_path / FILE) == {"a": ("U8", (3,), 0, 3)}


def test_the_error_names_a_shard_that_lacks_a_listed_tensor(sharded: Path) -> None:
    """The error has the index's key and file."""
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"model.layers.7.x": TWO}))
    assert refusal(sharded) == f"{INDEX}: weight_map maps model.layers.7.x to {TWO}, which does not have it"


def test_the_error_names_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    """Two shards have exchanged contents, or the index is wrong."""
    key = next(iter(read_header(sharded / ONE)))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({key: THREE}))
    assert refusal(sharded) == f"{ONE}: {key} is here, but {INDEX} maps it to {THREE}"
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({key: ONE}))
    (sharded / ONE).rename(sharded / "aside")
    (sharded / TWO).rename(sharded / ONE)
    (sharded / "aside").rename(sharded / TWO)
    assert refusal(sharded).startswith(f"{ONE}: ")


def test_a_tensor_that_the_index_omits_is_loaded(sharded: Path) -> None:
    """Some tools do not list tensors that they added later; the model must still use each."""
    key = next(iter(read_header(sharded / TWO)))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(key))
    assert load_checkpoint(sharded, FLOAT32)[1]
    save_file(load_file(sharded / TWO) | {"extra": np.zeros(2, np.float32)}, sharded / TWO)
    assert refusal(sharded) == "the checkpoint has tensors that this model does not use: extra"


def test_one_file_under_two_names_is_refused(sharded: Path) -> None:
    """This holds even if the text decoder needs none of its tensors."""
    save_file({"vision_tower.x": np.zeros(2, np.float32)}, sharded / "x1")
    (sharded / "x2").symlink_to("x1")
    extra = {"vision_tower.x": "x1", "vision_tower.y": "x2"}
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(extra))
    assert refusal(sharded) == "x2: vision_tower.x is stored twice in this checkpoint, first in x1"


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.safetensors", "/dev/zero", "/etc/passwd", f"sub/../{ONE}", f"./{ONE}", f"{ONE}/", "..", ".", ""),
        *("sub", "no\0ne", "\ud800", "x" * 5000, "pipe", "dangling", "loop"),
    ],
)
def test_names_outside_the_folder_are_refused(sharded: Path, name: str) -> None:
    """The error has key and name, and a file that would block is not opened."""
    (sharded / "sub").mkdir()
    (sharded.parent / "outside.safetensors").write_bytes((sharded / ONE).read_bytes())
    os.mkfifo(sharded / "pipe")
    (sharded / "dangling").symlink_to("nowhere")
    (sharded / "loop").symlink_to("loop")
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({EMBED: name}))
    message = refusal(sharded)
    assert message.startswith(f"{INDEX}: weight_map maps {EMBED} to ")
    assert message.endswith(", which is not a file of this checkpoint")
    message.encode()


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, {"a": None}, {"a": 3}, {"a": [ONE]}, {"a": {"b": ONE}}])
def test_an_index_without_file_names_is_refused(sharded: Path, value: object) -> None:
    """The error shows the value."""
    edit_json(sharded / INDEX, lambda index: index.update(weight_map=value))
    assert refusal(sharded).endswith("must map tensor names to file names")


def test_an_index_with_a_tensor_twice_is_refused(sharded: Path) -> None:
    """The loader does not guess which entry counts."""
    (sharded / INDEX).write_text(f'{{"weight_map": {{"{EMBED}": "{ONE}", "{EMBED}": "{TWO}"}}}}')
    assert refusal(sharded) == f"{sharded / INDEX}: key {EMBED} occurs twice"


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_pipes_devices_and_folders_are_refused(folder: Path, name: str) -> None:
    """Opening a pipe would block, and reading a device would never end."""
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda p: os.symlink("nowhere", p)):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert name in refusal(folder)
        if (folder / name).is_dir():
            (folder / name).rmdir()


def test_shards_may_be_links_into_a_folder_of_blobs(sharded: Path) -> None:
    """In the hub's cache, snapshots/<commit>/<name> links to ../../blobs/<hash>."""
    snapshot, blobs = sharded / "hub" / "snapshots" / "c0ffee", sharded / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", INDEX, ONE, TWO, THREE)):
        (sharded / name).rename(blobs / f"{number:064x}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert load_checkpoint(snapshot, FLOAT32)[1]["embed"].shape == (96, 64)


def test_the_shape_of_a_tied_head_is_checked(folder: Path) -> None:
    """The check precedes the comparison of head and embedding."""
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert "lm_head" in load_checkpoint(folder, FLOAT32)[1]
    tensors = load_file(folder / FILE)
    for change in ({"lm_head.weight": tensors[NORM]}, {EMBED: tensors[EMBED].astype(np.int8)}, {NORM: tensors[EMBED]}):
        save_file(tensors | change, folder / FILE)
        assert f"{FILE}: {next(iter(change))} has " in refusal(folder)


def test_json_files_are_bounded_in_bytes_and_values(tmp_path: Path) -> None:
    """Cases are sparse files and files of many small values."""
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"has {MAX_BYTES + 1} bytes: must have at most {MAX_BYTES}"):
        read_object(path)
    content = b'{"a": [' + b"{}," * (MAX_VALUES // 2) + b"1]}"
    with pytest.raises(CheckpointError, match=r"config\.json has up to .* values: must have at most"):
        parse_object(content, "config.json")
    assert len(parse_object(b'{"a": [' + b"1," * 1000 + b"1]}", "x")["a"]) == 1001


def test_bombs_are_refused_with_little_memory_and_time(tmp_path: Path) -> None:
    """The operating system limits the memory of the loading process."""
    write_valid(tmp_path / "valid")
    folders = []
    for name, write in weight_bombs(*unpack(tmp_path / "valid" / FILE)).items():
        folders.append(tmp_path / name)
        write_valid(folders[-1])
        write(folders[-1] / FILE)
    for folder, (outcome, seconds) in loaded_within_limits(folders).items():
        assert (
            outcome.startswith(f"CheckpointError: {FILE} is not a readable safetensors file") or "lacks" in outcome
        ), folder
        assert seconds < 5, (folder, outcome)
