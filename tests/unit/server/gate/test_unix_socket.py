"""The Unix socket of --uds: only those whom its mode admits can connect, from the moment it exists."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from server.gate.unix_socket import bound
from tests.support.server.processes import ROOT, started


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_does_not_depend_on_the_umask(
    mode: int, umask: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        os, "chmod", lambda path, wanted: seen.append(stat.S_IMODE(Path(path).stat().st_mode) & ~wanted)
    )
    with bound(str(tmp_path / "s"), mode):
        assert seen == [0], "nobody else may connect before the mode is set"
    monkeypatch.undo()
    with bound(str(tmp_path / "s"), mode):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode


def test_a_socket_that_was_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    path.chmod(0o666)
    with bound(str(path), 0o600):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("s")
    for name in ("file", "link"):
        with pytest.raises(OSError, match="in use"):
            bound(str(tmp_path / name), 0o600)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("front_ends", [0, 2])
def test_a_server_listens_with_that_mode(front_ends: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = {"uds": str(path), "uds_mode": "660", "api_server_count": front_ends}
    script = str(ROOT / "tests" / "support" / "server" / "fake_process.py")
    with started([script, "{}", json.dumps(options)], environ={"PYTHONPATH": str(ROOT)}) as process:
        assert process.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/health").status_code == 200
