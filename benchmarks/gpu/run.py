"""A call to a GPU machine: its stages one after another, within its time, and the few files that come back.

    python -m benchmarks.gpu.run --call 1 --out $OUT [--seconds 270] [--again STAGE ...] [--stages STAGE ...]
    python -m benchmarks.gpu.run --call 1 --out DIR --rehearse       the same with small sizes on a CPU

`make gpu CALL=1` calls it. The calls are listed in `benchmarks.gpu.calls`:

    1  facts, ladder, numerics, cached against cold       is anything wrong?
    2  decode steps and prefill chunks, with their kernels
    3  throughput
    4  draws; attention beside torch; attention and experts tuned
    5  transformers on the same load
    6  the server under load, a soak

A stage is a process with a limit. It starts if its least time is left, and is skipped if the ladder found a kernel
broken that it needs, or if its result file, in DIR or in --earlier, says that it is complete. What comes back is packed
after every stage, so a call that is ended from outside loses one stage only; at the end it has the report of
`benchmarks.predict.report`, too. `benchmarks.gpu.bring_back` unpacks it.
The exit status is 1 if a stage has failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import result_file
from benchmarks.gpu import site
from benchmarks.gpu.bring_back import HOME, pack
from benchmarks.gpu.calls import CALL_SECONDS, CALLS, PACKING_SECONDS, REPORT_SECONDS
from benchmarks.gpu.stage import NOT_INSTALLED, ROOT, Ended, Place, Stage, run_stages

_GOOD = ("complete", "done before")


def main(words: Sequence[str] | None = None) -> int:
    """Run a call and print a table of its stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=int, choices=sorted(CALLS), required=True, help="number of the call")
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes back")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="of the whole call")
    parser.add_argument("--patience", type=float, default=1, help="factor of all limits, for a rehearsal on a busy CPU")
    parser.add_argument("--earlier", type=Path, help="folder with results of earlier calls (default: those committed)")
    parser.add_argument("--stages", nargs="+", help="only these stages of the call")
    parser.add_argument("--again", nargs="+", default=[], help="stages to run though they are complete")
    parser.add_argument("--commit", help="of the sources, where there is no git: for the headers of the results")
    args = parser.parse_args(words)
    stages = CALLS[args.call]
    names = [stage.name for stage in stages]
    if unknown := {*(args.stages or ()), *args.again} - set(names):
        parser.error(f"call {args.call} has no stage {', '.join(sorted(unknown))}: its stages are {', '.join(names)}")
    if not args.rehearse and (root := site.use()):
        print(f"ptxas of {site.FOLDER.name} is in {root}", flush=True)
    if args.commit:
        os.environ[result_file.COMMIT] = args.commit
    chosen = [stage for stage in stages if args.stages is None or stage.name in args.stages]
    with tempfile.TemporaryDirectory() as folder:
        earlier = args.earlier or (Path(folder, "none") if args.rehearse else HOME)
        place = Place(Path(folder), earlier, args.rehearse, args.patience)
        ended = run(args.call, chosen, place, args)
    print("\n".join(table(args.call, ended)))
    absent = NOT_INSTALLED if args.rehearse else None  # a machine for development has no torch beside jax
    return 0 if all(one.status in _GOOD or (absent and one.why.startswith(absent)) for one in ended) else 1


def run(call: int, stages: Sequence[Stage], place: Place, args: argparse.Namespace) -> list[Ended]:
    """Run the stages, and pack what there is after each."""
    seconds = args.seconds - PACKING_SECONDS - REPORT_SECONDS
    until, ended = time.monotonic() + seconds * place.patience, list[Ended]()
    for stage in stages:
        ended += run_stages([stage], place, (until - time.monotonic()) / place.patience, args.again)
        rows = [vars(one) for one in ended]
        result_file.write(place.out / f"call-{call}.json", {"rehearsal": place.rehearse, "stages": rows})
        pack(place.out, args.out, "\n".join(table(call, ended)) + "\n")
    found = report(place)
    print(found)
    pack(place.out, args.out, "\n".join([*table(call, ended), "", found]) + "\n")
    return ended


def report(place: Place) -> str:
    """Write tables and plots of the results beside them; return what differs from the prediction, or the error."""
    command = [sys.executable, "-m", "benchmarks.predict.report", str(place.out)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=REPORT_SECONDS * place.patience, check=True
        )
    except subprocess.SubprocessError as error:
        return f"no report: {error}"
    written = place.out / "report.md"
    return written.read_text() if written.is_file() else done.stdout


def table(call: int, ended: Sequence[Ended]) -> list[str]:
    """Return lines of Markdown: how each stage has ended."""
    rows = [f"| {one.stage} | {one.status} | {one.seconds:.0f} | {one.why} |" for one in ended]
    return [f"call {call}", "", "| stage | ended | seconds | why |", "| --- | --- | --- | --- |", *rows]


if __name__ == "__main__":
    sys.exit(main())
