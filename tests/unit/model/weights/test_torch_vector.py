"""A vector of a file that torch.save wrote (jswa/model/weights/torch_vector.py)."""

from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest

from jswa.errors import CheckpointError
from jswa.model.weights.torch_vector import read_vector
from tests.support.drafts.dflash import write_saved

VECTOR = np.arange(6, dtype=np.float32)


def test_the_vector_and_the_numbers_beside_it_are_read(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved.pt", VECTOR, 151675)
    found, numbers = read_vector(tmp_path / "saved.pt", 6)
    assert np.array_equal(found, VECTOR)
    assert numbers["mask_token_id"] == 151675


def test_numbers_of_16_bits_are_widened(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved.pt", VECTOR, 7, "BFloat16Storage")
    found, _ = read_vector(tmp_path / "saved.pt", 12)  # the same bytes: each number is the end of one and its beginning
    assert np.array_equal(found[1::2], VECTOR)


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    write_saved(path, VECTOR, 7)
    with pytest.raises(CheckpointError, match=r"saved\.pt: must have 7 numbers in float32, float16 or bfloat16"):
        read_vector(path, 7)
    with pytest.raises(CheckpointError, match=r"saved\.pt: data/0 must have at most 20 bytes"):
        read_vector(path, 5)
    write_saved(path, VECTOR, 7, "LongStorage")
    with pytest.raises(CheckpointError, match="must have 6 numbers"):
        read_vector(path, 6)
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match=r"saved\.pt cannot be read as torch\.save writes a file"):
        read_vector(path, 6)
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("saved/data.pkl", bytes(2**20))
        archive.writestr("saved/data/0", VECTOR.tobytes())
    with pytest.raises(CheckpointError, match="and not be compressed"):
        read_vector(path, 6)
    with ZipFile(path, "w") as archive:
        archive.writestr("saved/data.pkl", b"\xff")
        archive.writestr("saved/data/0", VECTOR.tobytes())
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_vector(path, 6)
    with ZipFile(path, "w") as archive:
        archive.writestr("saved/data.pkl", b".")
    with pytest.raises(CheckpointError, match="must have one tensor"):
        read_vector(path, 6)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    """The pickle would make a file."""
    made = tmp_path / "made"
    call = b"\x80\x02cos\nmkdir\nX" + len(str(made)).to_bytes(4, "little") + str(made).encode() + b"\x85R."
    with ZipFile(tmp_path / "saved.pt", "w") as archive:
        archive.writestr("saved/data.pkl", call)
        archive.writestr("saved/data/0", VECTOR.tobytes())
    with pytest.raises(CheckpointError, match="must have 6 numbers"):
        read_vector(tmp_path / "saved.pt", 6)
    assert not made.exists()
