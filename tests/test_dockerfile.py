"""The Dockerfile, without a daemon: what it says is checked in every run; nightly its steps are run one by one."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from pallas_kernels.cpu.build import LIBRARY
from server.options import ServeConfig
from tools.package import SMALL

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


class Step(NamedTuple):
    """An instruction of a stage, and the rest of its line."""

    stage: int
    kind: str
    words: str


def steps(text: str) -> list[Step]:
    """The instructions of a Dockerfile, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found, stage = [], -1
    for kind, _, words in (line.partition(" ") for line in lines if line.strip()):
        stage += kind == "FROM"
        found.append(Step(stage, kind, words.strip()))
    return found


STEPS = steps(TEXT)
LAST = max(step.stage for step in STEPS)


def only(kind: str, stage: int = LAST) -> str:
    """The rest of the one instruction of this kind in a stage."""
    (found,) = (step.words for step in STEPS if (step.stage, step.kind) == (stage, kind))
    return found


def sources(text: str) -> list[str]:
    """What is copied from the repository."""
    copies = [step.words.split() for step in steps(text) if step.kind == "COPY" and "--from" not in step.words]
    return [source for words in copies for source in words[:-1]]


def test_it_does_not_run_as_root() -> None:
    """The user is that of the manifests, who can write in its home only."""
    user = only("USER")
    (made,) = (step.words for step in STEPS if step.stage == LAST and step.kind == "RUN")
    assert shlex.split(made)[0] == "useradd"
    assert shlex.split(made)[-1] == user
    manifests = yaml.safe_load_all((ROOT / "docs" / "deploy" / "deployment.yaml").read_text(encoding="utf-8"))
    (deployment,) = (found for found in manifests if found["kind"] == "Deployment")
    security = deployment["spec"]["template"]["spec"]["securityContext"]
    assert f"--uid {security['runAsUser']} " in made
    assert STEPS.index(Step(LAST, "USER", user)) > STEPS.index(Step(LAST, "RUN", made))


def test_it_copies_files_of_the_repository_that_its_context_has() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = tracked.stdout.split("\0")
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    for source in sources(TEXT):
        assert any(file == source or file.startswith(f"{source}/") for file in files), source
        assert source in allowed, f".dockerignore leaves {source} out"
    assert set(sources(TEXT)) == allowed


def test_it_serves_on_the_port_that_it_names_and_names_no_package_index() -> None:
    assert only("EXPOSE") == str(ServeConfig().port)
    assert json.loads(only("ENTRYPOINT")) == ["jswa"]
    assert json.loads(only("CMD"))[:2] == ["serve", "tiny"]
    assert not re.search(r"https?://|index-url|find-links|proxy", TEXT, re.IGNORECASE)


def test_the_base_image_is_the_same_in_both_stages_and_named_by_its_digest() -> None:
    bases = {only("FROM", stage).removesuffix(" AS build") for stage in range(LAST + 1)}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.12-slim@sha256:[0-9a-f]{64}", bases.pop())


def test_the_kernels_are_compiled_in_a_stage_that_is_left_behind() -> None:
    """A compiler that fails is an error of the build; the image itself has neither compiler nor package lists.

    -P: not for the copy of the sources in the working directory.
    """
    first = [step.words for step in STEPS if step.stage == 0 and step.kind == "RUN"]
    assert first[-1].endswith("|| /opt/jswa/bin/python -P -m pallas_kernels.cpu.build")
    assert any(words.startswith("apt-get") and words.endswith("g++") for words in first)
    assert LAST > 0
    assert not any("apt-get" in step.words for step in STEPS if step.stage == LAST)


def test_both_images_are_documented_and_in_the_lock() -> None:
    page = (ROOT / "docs" / "deploy" / "README.md").read_text(encoding="utf-8")
    extras = set(re.findall(r"--build-arg EXTRAS=(\w+)", page)) | {""}
    assert extras == {"", "cuda13"}
    for extra in extras:
        chosen = ["core", "server", "chat", *extra.split()]
        command = [sys.executable, "tools/lock.py", "select", *chosen]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("nvidia-cudnn" in done.stdout) == bool(extra)


@pytest.mark.nightly
def test_its_steps_build_what_it_starts(tmp_path: Path) -> None:
    """Each RUN in a folder that stands for /, with the files of the COPYs; then the entry point generates text."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (tools / "useradd").write_text(f'#!/bin/sh\nmkdir -p "{tmp_path}/home/jswa" && echo "$@" > "{tmp_path}/useradd"\n')
    (tools / "apt-get").write_text("#!/bin/sh\n")
    for tool in ("useradd", "apt-get"):
        (tools / tool).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if re.match("PIP_|SSL_|.*_(proxy|PROXY)$", name)}
    environ |= {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def here(words: str) -> str:
        return re.sub(r"(?<![\w.*])/(opt|src|home)\b", rf"{tmp_path}/\1", words)

    folder = tmp_path
    for step in STEPS:
        if step.kind == "WORKDIR":
            folder = Path(here(step.words))
            folder.mkdir(parents=True, exist_ok=True)
        elif step.kind in ("ARG", "ENV"):
            for setting in shlex.split(step.words):
                name, _, value = setting.partition("=")
                environ[name] = here(value).replace("$PATH", environ["PATH"])
        elif step.kind == "COPY" and "--from" not in step.words:
            *copied, target = step.words.split()
            for source in copied:
                _copy(source, folder / (source if target == "./" else target))
        elif step.kind == "RUN":
            subprocess.run(["sh", "-c", here(step.words)], cwd=folder, env=environ, check=True)
    libraries = list((tmp_path / "opt" / "jswa").rglob(LIBRARY.name))
    assert len(libraries) == (platform.machine() == "x86_64")
    assert (tmp_path / "useradd").read_text().split()[-1] == "jswa"
    (entry,) = json.loads(only("ENTRYPOINT"))
    program = shutil.which(entry, path=environ["PATH"])
    assert program is not None
    assert program.startswith(str(tmp_path))
    done = subprocess.run(
        [program, "generate", "a", *SMALL], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("a")
    done = subprocess.run([program, "serve", "--help"], env=environ, capture_output=True, text=True, check=True)
    assert "--port" in done.stdout


def _copy(source: str, target: Path) -> None:
    """Copy what git tracks of a file or folder."""
    found = subprocess.run(["git", "ls-files", "-z", source], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, found.stdout.split("\0")):
        to = target / Path(name).relative_to(source) if name != source else target
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to)
