"""The manifests of docs/deploy against Kubernetes' own schemas, which are part of kubernetes-validate."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.processes import ROOT
from tests.unit.cluster.test_manifests import CUSTOM, FILES, RAY, documents, find

pytestmark = [pytest.mark.scale, pytest.mark.usefixtures("ray_environment"), pytest.mark.nightly]
VALIDATE = ROOT / ".venv-ray" / "bin" / "kubernetes-validate"
VERSION = "1.37"


def check(resources: list[dict[str, Any]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run kubernetes-validate; with `strict`, unknown fields are errors."""
    files = []
    for number, resource in enumerate(resources):
        files.append(folder / f"{number}.json")  # JSON is YAML
        files[-1].write_text(json.dumps(resource))
    command = [str(VALIDATE), "--strict", "-k", VERSION, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def kubernetes(file: Path) -> list[dict[str, Any]]:
    """Return the resources of Kubernetes itself, and the pods of custom resources."""
    found: list[dict[str, Any]] = []
    for document in documents(file):
        if (document["apiVersion"], document["kind"]) in CUSTOM:
            templates = [one for key in ("template", "leaderTemplate", "workerTemplate") for one in find(document, key)]
            head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
            found += [{**head, "template": template} for template in templates]
        else:
            found.append(document)
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file.name != RAY], ids=lambda file: file.stem)
def test_manifests_follow_the_schemas(file: Path, tmp_path: Path) -> None:
    resources = kubernetes(file)
    done = check(resources, tmp_path) if resources else None
    assert done is None or done.returncode == 0, done.stdout + done.stderr


def test_the_check_can_fail(tmp_path: Path) -> None:
    resources = kubernetes(next(file for file in FILES if file.stem == "deployment"))
    (container,) = next(find(resources[0], "containers"))
    container["livenessProb"] = container.pop("livenessProbe")
    assert check(resources, tmp_path).returncode != 0
