"""Weights from another process, in shared memory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jswa
from jswa.errors import WeightsError
from jswa.running.handed_over import handed_over, read_handed_over
from tests.e2e.rl.test_update_weights import ask

# It scales all weights of `tiny`, in the decoder's own names, and says where they are until it may end.
TRAINER = """
import sys
from jswa.rl.trainer import handed_over, parameters
with handed_over({name: 1.25 * array for name, array in parameters("tiny").items()}) as path:
    print(path, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def trainer() -> Iterator[Path]:
    """Run the trainer, yield the path of its weights, and let it end."""
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.communicate("\n")
    assert process.returncode == 0


def test_weights_of_another_process_are_used_and_then_gone(llm: jswa.LLM) -> None:
    """Tokens are those of the same arrays given directly; the file is readable by its user alone."""
    version = llm.weights_version
    with trainer() as path:
        assert path.parent.stat().st_mode & 0o077 == 0
        assert llm.update_weights(path) == version + 1
        found = ask(llm)
        given = dict(read_handed_over(path))
    assert not path.parent.exists()
    assert set(found.versions) == {version + 1}
    assert llm.update_weights(given) == version + 2
    assert ask(llm).token_ids == found.token_ids
    with pytest.raises(WeightsError, match="jswa-weights"):
        llm.update_weights(path)


def test_every_bit_arrives(tmp_path: Path) -> None:
    """Of each type, of views and of scalars."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 8)).astype(np.float32)
    params: dict[str, Any] = {
        "whole": whole,
        "turned": whole.T[::2],
        "narrow": whole.astype(ml_dtypes.bfloat16),
        "half": whole.astype(np.float16),
        "one": np.float32(3).reshape(()),
        "none": np.zeros((0, 4), np.float32),
    }
    with handed_over(params, tmp_path) as path:
        found = dict(read_handed_over(path))
    assert found.keys() == params.keys()
    for name, array in params.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_damaged_weights_are_refused_by_name_and_change_nothing(
    llm: jswa.LLM, weights: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A changed byte of any tensor, a cut file, and a file without checksums."""
    version, first = llm.weights_version, ask(llm)
    with handed_over(weights[1], tmp_path) as path:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(WeightsError, match=r"model\.\S+ is damaged: its bytes must have the CRC-32 \d+"):
            llm.update_weights(path)
        path.write_bytes(data[:-1])
        with pytest.raises(WeightsError, match="data_offsets"):
            llm.update_weights(path)
    plain = tmp_path / "plain.safetensors"
    save_file(weights[0], plain)
    with pytest.raises(WeightsError, match="no checksums"):
        llm.update_weights(plain)
    assert (llm.weights_version, ask(llm).token_ids) == (version, first.token_ids)
