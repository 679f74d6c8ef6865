"""requirements.lock agrees with pyproject.toml."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import LOCK, ROOT, fits, select

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHOICES: dict[str, list[str]] = {
    "core": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
    **PROJECT["dependency-groups"],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_lock_has_what_an_extra_asks_for(choice: str) -> None:
    """A dependency that was added or raised without `make lock` fails here."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", select(["core", choice]), re.MULTILINE))
    for line in CHOICES[choice]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


def test_every_package_has_hashes_and_no_index_is_named() -> None:
    text = LOCK.read_text(encoding="utf-8")
    requirements = re.findall(r"^[^#\s].*\n", text, re.MULTILINE)
    assert len(requirements) > 150
    assert all(line.endswith(" \\\n") for line in requirements)
    assert "://" not in text


def test_a_name_that_the_lock_lacks_is_refused() -> None:
    with pytest.raises(SystemExit, match="nonsense"):
        select(["core", "nonsense"])


@pytest.mark.parametrize(
    ("wheel", "locked"),
    [
        ("tqdm-4.70.1-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("numpy-2.5.5-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("hf_xet-1.8.0-cp38-abi3-macosx_11_0_arm64.whl", True),
        ("numpy-2.5.5-cp311-cp311-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.5.5-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.5.5-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("numpy-2.5.5-cp312-cp312-win_amd64.whl", False),
    ],
)
def test_wheels_of_the_supported_pythons_and_platforms_are_locked(wheel: str, locked: bool) -> None:
    assert fits(wheel) == locked
