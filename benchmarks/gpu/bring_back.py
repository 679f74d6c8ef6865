"""What comes back from a call: at most eight files of 16 MiB in one folder.

    python -m benchmarks.gpu.bring_back DIR [--to benchmarks/results/h200]

A call packs its folder into `results.tar.gz` (result files, tunings, XLA's autotuning) and `logs.tar.gz` (both ends of
each log), and writes `summary.md`. On the machine that has the repository this module unpacks the first into the folder
to commit, and merges autotuning into `autotune.txtpb`, which the next call loads.
"""

import argparse
import gzip
import io
import re
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_FILES, MOST_BYTES = 8, 16 * 2**20
LOG_BYTES = 2**18  # of each log, its beginning and its end: the first error and the last
RESULTS, LOGS, SUMMARY = "results.tar.gz", "logs.tar.gz", "summary.md"
HOME = Path(__file__).parents[1] / "results" / "h200"
AUTOTUNE = ".autotune.txtpb"
_ENTRY = re.compile(r"^results? \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)


def pack(folder: Path, out: Path, summary: str) -> list[Path]:
    """Write what comes back from the results and logs of a folder. Raises ValueError if it is too large."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    logs = [path for path in files if path.suffix in (".log", ".events")]
    made = [
        _archive(out / RESULTS, ((path.name, path.read_bytes()) for path in files if path not in logs)),
        _archive(out / LOGS, ((path.name, cut(path.read_bytes())) for path in logs)),
        out / SUMMARY,
    ]
    (out / SUMMARY).write_text(summary)
    too_large = [path.name for path in made if path.stat().st_size > MOST_BYTES]
    if too_large or len(made) > MOST_FILES:
        raise ValueError(f"{', '.join(too_large)}: more than {MOST_BYTES} bytes do not come back")
    return made


def cut(log: bytes, most: int = LOG_BYTES) -> bytes:
    """Return a log, without its middle if it is long."""
    if len(log) <= most:
        return log
    return log[: most // 2] + b"\n[...]\n" + log[-(most // 2) :]


def _archive(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    """Write an archive at once: a call may be killed at any time, and leaves the one before."""
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    part = path.with_suffix(".part")
    part.write_bytes(content.getvalue())
    return part.replace(path)


def unpack(folder: Path, to: Path) -> list[Path]:
    """Unpack the results of a call into the folder to commit; return the files."""
    to.mkdir(parents=True, exist_ok=True)
    found, tuned = [], []
    with tarfile.open(folder / RESULTS) as tar:
        for entry in tar:
            data = tar.extractfile(entry)
            assert data is not None, entry.name
            if entry.name.endswith(AUTOTUNE):
                tuned.append(data.read().decode())
                continue
            target = to / Path(entry.name).name
            target.write_bytes(data.read())
            found.append(target)
    if tuned:
        merged = to / "autotune.txtpb"
        before = [merged.read_text()] if merged.is_file() else []
        merged.write_text(merge(*before, *tuned))
        found.append(merged)
    return found


def merge(*texts: str) -> str:
    """Merge XLA's autotuning (text protos of AutotuneResults): its header once, each entry once, the first one wins.

    Raises ValueError if the headers, which have the version, differ.
    """
    headers = {_ENTRY.sub("", text).strip() for text in texts if text.strip()}
    if len(headers) > 1:
        raise ValueError(f"autotuning of several versions: {sorted(headers)}")
    entries: dict[str, str] = {}
    for text in texts:
        for entry in _ENTRY.findall(text):
            key = entry.partition("  result {")[0]  # device and HLO
            entries.setdefault(key, entry)
    return "".join(f"{header}\n" for header in headers) + "".join(entries.values())


def main(words: Sequence[str] | None = None) -> None:
    """Unpack, and say what there is to commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that a call has written")
    parser.add_argument("--to", type=Path, default=HOME, help="folder to commit")
    args = parser.parse_args(words)
    print(*unpack(args.folder, args.to), sep="\n")
    print((args.folder / SUMMARY).read_text())


if __name__ == "__main__":
    main()
