"""A stage of a call: one module, run as a process with a limit, that writes one result file.

A result file says itself whether it is complete: `run_stage` adds `complete`, the seconds that the stage has taken,
once its process has ended well. So a call that is run again leaves out what has been measured, and measures again what
has been deleted.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import result_file
from benchmarks.gpu.supervise import end, last_lines
from tools.cases.kernels.ladder import Kernel

ROOT = Path(__file__).parents[2]
Status = Literal["complete", "failed", "out of time", "skipped", "not started", "done before"]

NOT_INSTALLED = "not installed"  # why a stage is skipped that needs a package


@dataclass(frozen=True)
class Stage:
    """A module and its arguments.

    Attributes:
        name: of the stage, its log and its result file.
        module: run by `python -m`; it takes --json FILE, and exits with 0 if all is well.
        gpu, cpu: its arguments in a call, and in a rehearsal on a CPU. "{out}" is the folder of the results, "{broken}"
            becomes the names of the broken kernels.
        least, most: seconds that must be left for it to start, and after which it is ended.
        needs: kernels without which it makes no sense.
        packages: modules that it imports and that a machine may lack.
        autotune: whether XLA times its products, and what it finds is brought back.
    """

    name: str
    module: str
    gpu: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    least: int = 30
    most: int = 60
    needs: tuple[Kernel, ...] = ()
    packages: tuple[str, ...] = ()
    autotune: bool = True


@dataclass(frozen=True)
class Ended:
    """How a stage has ended."""

    stage: str
    status: Status
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Place:
    """Where a call runs and what it knows.

    Attributes:
        out: folder of result files and logs.
        earlier: folder with result files of earlier calls, and their autotuning.
        rehearse: whether it runs small sizes on a CPU.
        patience: factor of all limits of stages: on a CPU that others use, a rehearsal takes many times as long.
    """

    out: Path
    earlier: Path
    rehearse: bool = False
    patience: float = 1.0

    @property
    def autotuning(self) -> Path:
        """What XLA has found in earlier calls, if there were any."""
        return self.earlier / "autotune.txtpb"

    def file(self, name: str) -> Path:
        """Return the result file of a stage: of this call if there is one, else of an earlier one."""
        own = self.out / f"{name}.json"
        return own if own.is_file() else self.earlier / f"{name}.json"

    def is_complete(self, name: str) -> bool:
        """Return whether a stage has been measured."""
        return "complete" in result_file.read(self.file(name))

    def broken(self) -> list[Kernel]:
        """Return the kernels that the ladder found broken."""
        return list(result_file.read(self.file("ladder")).get("broken", []))


def run_stage(stage: Stage, place: Place, seconds: float) -> Ended:
    """Run a stage in at most `seconds`, unless it lacks something; say in its result file whether it is complete."""
    broken = place.broken()
    if lacking := [kernel for kernel in stage.needs if kernel in broken]:
        return Ended(stage.name, "skipped", why=f"the ladder found broken: {', '.join(lacking)}")
    if absent := [name for name in stage.packages if importlib.util.find_spec(name) is None]:
        return Ended(stage.name, "skipped", why=f"{NOT_INSTALLED}: {', '.join(absent)}")
    begin, log, out = time.monotonic(), place.out / f"{stage.name}.log", place.out / f"{stage.name}.json"
    command = [sys.executable, "-X", "faulthandler", "-m", stage.module, *_arguments(stage, place, broken)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--json", str(out)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True, env=_environ(stage, place),
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
            status = None
        except BaseException:
            end(process)
            raise
    took = time.monotonic() - begin
    if status is None:
        return Ended(stage.name, "out of time", took, last_lines(log))
    if status != 0 or not out.is_file():
        return Ended(stage.name, "failed", took, f"exit status {status}: {last_lines(log)}")
    result_file.write(out, {**result_file.read(out), "complete": took}, header={})
    return Ended(stage.name, "complete", took)


def _arguments(stage: Stage, place: Place, broken: Collection[str]) -> list[str]:
    words: list[str] = []
    for word in stage.cpu if place.rehearse else stage.gpu:
        words += broken if word == "{broken}" else [word.replace("{out}", str(place.out))]
    return words


def _environ(stage: Stage, place: Place) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if stage.autotune:
        flags.append(f"--xla_gpu_dump_autotune_results_to={place.out / stage.name}.autotune.txtpb")
        if place.autotuning.is_file():
            flags.append(f"--xla_gpu_load_autotune_results_from={place.autotuning}")
    platform = {} if not place.rehearse else {"JAX_PLATFORMS": "cpu"}
    return {
        "JAX_PLATFORMS": "cuda", "PYTHONUNBUFFERED": "1", **os.environ, **platform,
        "XLA_FLAGS": " ".join(flags).strip(),
    }  # fmt: skip


def run_stages(stages: Sequence[Stage], place: Place, seconds: float, again: Collection[str] = ()) -> list[Ended]:
    """Run stages in their order within `seconds`: each starts if its least time is left, and has its most time at most.

    A stage that has been measured before is left out, unless `again` names it.
    """
    until, out = time.monotonic() + seconds * place.patience, list[Ended]()
    for stage in stages:
        left = (until - time.monotonic()) / place.patience
        if place.is_complete(stage.name) and stage.name not in again:
            out.append(Ended(stage.name, "done before"))
        elif left < stage.least:
            out.append(Ended(stage.name, "not started", why=f"{left:.0f} s are left, {stage.least} needed"))
        else:
            out.append(run_stage(stage, place, min(stage.most, left) * place.patience))
        print(f"{out[-1].stage:24} {out[-1].status:12} {out[-1].seconds:6.1f} s  {out[-1].why}", flush=True)
    return out
