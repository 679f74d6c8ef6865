"""The nightly run: its stages, and a committed line that tells when all of them last passed.

    python -m tools.nightly run STAGE… --all STAGE…   make each target of the first list, whatever fails; once all that
                                                      there are have passed, write the line
    python -m tools.nightly last                      print how long ago that was

The line is in tests/nightly.txt: time (UTC), commit, seconds, stages. It belongs into the next commit. It is written
once all stages have passed on one commit in one night (TEST_NIGHT). A stage that has passed does not run again on that
commit in that night, so a run that was stopped goes on where it was. A stage that has failed there runs again with the
tests that failed (AGAIN in the Makefile): each test must pass, and those that did need not do so twice. Needs only git
and Python.
"""

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = Path("tests") / "nightly.txt"
RECORDS = (LINE.as_posix(), "tests/passed.txt")  # what runs write about themselves
STAGES = Path(".nightly")  # git ignores it: lines of commit, night, stage, seconds and "passed" or "failed"
NOW = datetime.datetime.now


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    """Run a command. Exits with 1 if a stage fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("last", help="print how long ago the whole run last passed")
    of_run = commands.add_parser("run", help="make stages, one after the other")
    of_run.add_argument("stages", nargs="+", help="targets of the Makefile")
    of_run.add_argument("--all", nargs="+", required=True, help="the targets of a whole run")
    options = parser.parse_args(arguments)
    if options.command == "last":
        print(last(root, NOW(datetime.UTC)))
    else:
        run(options.stages, options.all, root)


def run(stages: list[str], whole: list[str], root: Path) -> None:
    """Make each stage, print its seconds, and write the line if all have passed. Exits with 1 if a stage failed."""
    today = str(NOW(datetime.UTC).date().toordinal())
    night = os.environ.setdefault("TEST_NIGHT", today)  # what takes turns keeps it past 0:00
    commit = tree(root)
    done, failed = ended(root, commit, night, "passed"), []
    before = ended(root, commit, night, "failed")
    for stage in stages:
        if stage in done:
            print(f"nightly: {stage} has passed on this commit, in {done[stage]} s", flush=True)
            continue
        start = time.monotonic()
        again = ["AGAIN=--last-failed"] if stage in before else []
        code = subprocess.run(["make", "--no-print-directory", stage, *again], cwd=root, check=False).returncode
        seconds = round(time.monotonic() - start) + before.get(stage, 0)
        print(f"nightly: {stage} took {seconds} s{', the failed tests once more' * bool(again)}", flush=True)
        if code:
            failed.append(stage)
        if commit is not None and tree(root) == commit:
            done |= {} if code else {stage: seconds}
            with (root / STAGES).open("a") as file:
                file.write(f"{commit} {night} {stage} {seconds} {'failed' if code else 'passed'}\n")
    if failed:
        sys.exit(f"nightly: FAILED: {' '.join(failed)}")
    print("nightly: all of these stages have passed")
    if commit is None or tree(root) != commit:
        print(f"nightly: {LINE} is not written: the tree was not one commit from begin to end")
    elif missing := [stage for stage in whole if stage not in done]:
        print(f"nightly: {LINE} is not written: on this commit these stages have not passed: {' '.join(missing)}")
    else:
        seconds = sum(done[stage] for stage in whole)
        (root / LINE).write_text(f"{NOW(datetime.UTC):%Y-%m-%dT%H:%M:%SZ} {commit} {seconds} {' '.join(whole)}\n")
        print(f"nightly: commit {LINE}, which tells when this was")


def ended(root: Path, commit: str | None, night: str, how: str) -> dict[str, int]:
    """Return the seconds of the stages that have passed, or failed, on a commit in a night."""
    file = root / STAGES
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return {line[2]: int(line[3]) for line in lines if line[:2] == [commit, night] and line[4:] == [how]}


def tree(root: Path) -> str | None:
    """Return the commit that the tree is, but for the records.

    None if it differs, has files that git neither knows nor ignores, or is no checkout.
    """
    others = git(root, "status", "--porcelain", "--", ".", *(f":(exclude){name}" for name in RECORDS))
    return git(root, "rev-parse", "HEAD") if others == "" else None


def last(root: Path, now: datetime.datetime) -> str:
    """Return how long ago the whole run last passed, at which commit, and how many commits came since.

    In a shallow clone the commit may be missing; then the commits since are not counted.
    """
    file = root / LINE
    if not file.exists():
        return "nightly has never passed as a whole"
    moment, commit, seconds, *_ = file.read_text().split()
    days = (now.date() - datetime.datetime.fromisoformat(moment).date()).days
    ago = "today" if days <= 0 else f"{days} day{'s' * (days > 1)} ago"
    count = git(root, "rev-list", "--count", f"{commit}..HEAD")
    since = "commits since unknown" if count is None else f"{count} commit{'s' * (count != '1')} since"
    return f"nightly last passed {ago}, at {commit[:7]}, in {round(int(seconds) / 60)} min ({since})"


def git(root: Path, *words: str) -> str | None:
    """Return what git prints; None if it fails, or is not installed."""
    try:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None


if __name__ == "__main__":
    main()
