"""Damaged GGUF files: any bytes give a checkpoint or a ModelError that names the file, never another error."""

import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.errors import ModelError
from jswa.gguf.checkpoint import Checkpoint, read_checkpoint
from jswa.gguf.made import read_made
from tests.parity.load import load_fixture
from tests.support.gguf.convert import convert


@cache
def whole() -> bytes:
    """A small valid file."""
    fixture = load_fixture("llama_one_layer")
    path = Path(mkdtemp()) / "it.gguf"
    convert(path, {**fixture.config, **(fixture.old_config or {})}, fixture.tensors, "Q8_0")
    return path.read_bytes()


@cache
def header_bytes() -> int:
    """The bytes before the tensors, where damage matters."""
    tensors = read_checkpoint_of(whole()).tensors.values()
    return min(source.begin for made in tensors for source in made.sources)


@cache
def folder() -> Path:
    """A folder for damaged files."""
    return Path(mkdtemp())


def read_checkpoint_of(data: bytes) -> Checkpoint:
    """The checkpoint in these bytes."""
    path = folder() / "damaged.gguf"
    path.write_bytes(data)
    return read_checkpoint(path)


def read_all(data: bytes) -> None:
    """Read what a start reads of the model."""
    checkpoint = read_checkpoint_of(data)
    files = {path: os.open(path, os.O_RDONLY) for path in checkpoint.paths}
    try:
        for made in checkpoint.tensors.values():
            rows = int(np.prod(made.shape[:-1])) if len(made.shape) > 1 else 1
            if rows * made.shape[-1] < 2**20:
                read_made(made, files, 0, rows, made.shape[-1], {})
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def refused_or_read(data: bytes) -> None:
    """Read, or refuse with an error that names the file."""
    said = "damaged.gguf"
    try:
        read_all(data)
    except ModelError as error:
        said = str(error)
    assert "damaged.gguf" in said


def test_the_file_itself_is_read() -> None:
    read_all(whole())


@given(st.data())
def test_changed_bytes_are_refused_or_read(data: st.DataObject) -> None:
    changed = bytearray(whole())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header_bytes() - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(changed))


@given(st.integers(0, 2**16), st.binary(max_size=40))
def test_bytes_that_are_inserted_are_refused_or_read(at: int, more: bytes) -> None:
    at %= header_bytes()
    refused_or_read(whole()[:at] + more + whole()[at:])


@given(st.integers(0, 2**20))
def test_files_that_end_early_are_refused(at: int) -> None:
    with pytest.raises(ModelError):
        read_all(whole()[: at % len(whole())])


@given(st.integers(0, 2**16), st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1]))
def test_huge_counts_are_refused_or_read(at: int, count: int) -> None:
    """Eight bytes anywhere become a huge number: no memory is allocated by it."""
    at %= header_bytes() - 8
    refused_or_read(whole()[:at] + count.to_bytes(8, "little") + whole()[at + 8 :])


@given(st.binary(max_size=200))
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ModelError):
        read_all(b"GGUF\x03\0\0\0" + data)
