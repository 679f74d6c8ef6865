"""What hosts find out about each other at start (jswa/cluster/hosts.py)."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from jswa.cluster.hosts import is_shared


def answers(folders: list[Path | None]) -> list[bool]:
    """Return what each host finds out about its folder; hosts are threads that meet at each `least`."""
    numbers: dict[int, int] = {}
    barrier = Barrier(len(folders), timeout=30)

    def host(rank: int) -> bool:
        def least(number: int) -> int:
            numbers[rank] = number
            barrier.wait()
            found = min(numbers.values())
            barrier.wait()
            return found

        return is_shared(folders[rank], rank, least)

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(host, range(len(folders))))


@pytest.mark.parametrize(
    ("names", "shared"),
    [(["a", "a", "a"], True), (["a", "a", "b"], False), ([None, "a"], False), (["a", None], False), ([None], False)],
)
def test_hosts_agree_on_whether_they_share_a_folder(names: list[str | None], shared: bool, tmp_path: Path) -> None:
    """One that does not see host 0's file, or has no folder, decides for all; no file is left."""
    folders = [None if name is None else tmp_path / name for name in names]
    for folder in folders:
        if folder is not None:
            folder.mkdir(exist_ok=True)
    assert answers(folders) == [shared] * len(names)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
