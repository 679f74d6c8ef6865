"""Run test cases of kernels in child processes, such that whatever a case does to its process, it is named.

A case that takes too long is hung: its process gets SIGABRT, on which faulthandler writes all stacks to the log, and is
killed. A case in which the process dies has died. After an illegal address a GPU computes nothing more in that process
(see tests/support/kernels/case_events.py). In all three cases a new process goes on with the next case.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
Outcome = Literal["passed", "failed", "skipped", "hung", "died", "not run"]
BAD: tuple[Outcome, ...] = ("failed", "hung", "died")
_PYTEST = ("-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "")
_EVENTS = ("-p", "tests.support.kernels.case_events", "--case-events")
_POLL = 0.1  # seconds
_STACKS = 5.0  # seconds for faulthandler to write the stacks


@dataclass(frozen=True)
class Verdict:
    """How a case has ended, after how many seconds, and why if it is not right."""

    case: str
    outcome: Outcome
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Cases:
    """The cases to run, and their limits.

    Attributes:
        select: arguments of pytest (files, ids, -k).
        seconds: after which a case is hung.
        shard: which of them: "0/4" is every fourth, from the first.
        start_seconds: in which a process must come to its first case: it imports, and starts the GPU.
    """

    select: tuple[str, ...]
    seconds: float
    shard: str = "0/1"
    start_seconds: float = 60.0


def run_cases(cases: Cases, log: Path, *, until: float, environ: Mapping[str, str] = {}) -> list[Verdict]:
    """Run cases one after the other; return a verdict for each, in their order. Cases that did not begin are "not run".

    Args:
        log: output of all processes; the events are beside it, in `log`.events.
        until: time.monotonic() at which everything must have ended.
        environ: changes to the environment.
    """
    events = log.with_suffix(".events")
    events.unlink(missing_ok=True)
    command = [sys.executable, *_PYTEST, *_EVENTS, str(events), "--case-shard", cases.shard, *cases.select]
    ended: dict[str, Verdict] = {}
    while time.monotonic() < until:
        before = _begun(events)
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                env={"PYTHONUNBUFFERED": "1", "TEST_NIGHT": "0", **os.environ, **environ},
            )  # fmt: skip
            lost = _watch(process, cases, events, before, until)
        if lost is not None:
            ended[lost.case] = lost
        ended |= _ends(events)
        if process.returncode in (0, 1, 5) or _begun(events) == before:  # all have ended, or a process begins none
            break
    found = _found(events)
    if not found:
        return [Verdict(" ".join(cases.select), "died", why=last_lines(log))]
    return [ended.get(case, Verdict(case, "not run")) for case in found]


def _watch(
    process: subprocess.Popen[bytes], cases: Cases, events: Path, before: Collection[str], until: float
) -> Verdict | None:
    """Wait for a process, and end it when a case hangs; return the verdict of the case with which it was lost.

    `before`: cases that began in earlier processes, which were lost with them.
    """
    case, since, limit = "", time.monotonic(), cases.start_seconds
    while True:
        status = process.poll()
        running = _running(events, before)
        now = time.monotonic()
        if running != case:
            case, since, limit = running, now, cases.seconds
        if status is not None:
            why = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            return Verdict(case, "died", now - since, why) if case else None
        if now - since > limit or now > until:
            end(process)
            if not case:
                return None
            if now > until:
                return Verdict(case, "not run", now - since, "out of time")
            return Verdict(case, "hung", now - since, f"no end after {limit:.0f} s; the log has the stacks")
        time.sleep(_POLL)


def end(process: subprocess.Popen[Any]) -> None:
    """Have a process write its stacks, then kill it and all processes below it, whatever their sessions."""
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS)
    for pid in (process.pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    more = {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return sorted(found)


def _read(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text(encoding="utf-8").split("\n")[:-1] if events.exists() else []  # the last may be incomplete
    return [json.loads(line) for line in lines]


def _found(events: Path) -> list[str]:
    first = next((event for event in _read(events) if event["event"] == "found"), None)
    return [] if first is None else list(first["cases"])


def _begun(events: Path) -> set[str]:
    return {event["case"] for event in _read(events) if event["event"] == "begin"}


def _running(events: Path, before: Collection[str]) -> str:
    """Return the case that has begun last, in this process, and has not ended; empty if there is none."""
    running = ""
    for event in _read(events):
        if event["event"] == "begin":
            running = event["case"]
        elif event["event"] == "end" and event["case"] == running:
            running = ""
    return "" if running in before else running


def _ends(events: Path) -> dict[str, Verdict]:
    return {
        event["case"]: Verdict(event["case"], event["outcome"], event["seconds"], short(event["why"]))
        for event in _read(events)
        if event["event"] == "end"
    }


def short(why: str, most: int = 300) -> str:
    """Return a reason on one line."""
    line = " ".join(why.split())
    return line if len(line) <= most else line[:most] + " …"


def last_lines(log: Path, count: int = 5) -> str:
    """Return the end of a log on one line."""
    return short(" / ".join(log.read_text(errors="replace").splitlines()[-count:])) if log.exists() else ""


def as_rows(verdicts: Sequence[Verdict], **more: Any) -> list[dict[str, Any]]:
    """Return rows for a result file."""
    return [{**more, **vars(replace(verdict))} for verdict in verdicts]
