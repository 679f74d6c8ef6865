"""Hosts compare their weights by a fingerprint of a few blocks of each file."""

from pathlib import Path

import pytest

from jswa.model.weights.safetensors_files import weights_fingerprint


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "weights/embed/0.0"])
@pytest.mark.parametrize("size", [0, 1, 1000, 400_000])
def test_the_fingerprint_depends_on_size_start_middle_and_end(name: str, size: int, tmp_path: Path) -> None:
    same = bytes(range(256)) * (size // 256 + 1)
    write(tmp_path / "a", name, same[:size])
    write(tmp_path / "b", name, same[:size])
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "b")
    for offset in {0, size // 2, size - 1} if size else ():
        changed = bytearray(same[:size])
        changed[offset] ^= 1
        write(tmp_path / "b", name, bytes(changed))
        assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b"), offset
    write(tmp_path / "b", name, same[: size + 1])
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")


def test_other_files_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "a", "model.safetensors", b"1")
    write(tmp_path / "b", "model.safetensors", b"1")
    write(tmp_path / "b", "README.md", b"words")
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "b")
    write(tmp_path / "b", "model-2.safetensors", b"")
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")
