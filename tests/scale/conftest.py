"""The environment of the tests that need Ray and what validates manifests."""

import subprocess

import pytest

from tests.support.server.processes import ROOT


@pytest.fixture(scope="session")
def ray_environment() -> None:
    """Install .venv-ray, 300 MB of packages, where a test needs it."""
    subprocess.run(["make", "--no-print-directory", ".venv-ray/installed"], cwd=ROOT, check=True)
