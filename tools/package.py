"""Build the wheel and the sdist into dist/, check what they hold, then install the wheel and run it: `make package`.

    python -m tools.package PYTHON     PYTHON: of an environment that has only what jswa's extra `server` needs

The wheel holds every file that git tracks in jswa/, pallas_kernels/ and server/, and nothing else; the sdist adds what
a build needs. Where the library of CPU kernels can be compiled there is a second wheel, for this platform alone: the
same files and the library. The wheel that pip builds from the sdist has the same bytes as the wheel built from the
checkout, so one installation tests both. The archives are built from a copy of the files that git tracks, and the
commands run in an empty folder, out of reach of the checkout's modules: other programs may use the checkout meanwhile.
"""

import base64
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.cpu import build as native

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LIBRARY = native.LIBRARY
FOLDERS = ("jswa", "pallas_kernels", "server")
BESIDE = {".gitignore", "CHANGELOG.md", "LICENSE", "NOTICE", "PKG-INFO", "README.md", "pyproject.toml"}
TYPED = {"jswa/py.typed", "jswa/_server/py.typed", "pallas_kernels/py.typed"}
# One shape of steps, so that one program is compiled.
SMALL = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "128", "--deterministic")


def build() -> tuple[Path, Path]:
    """Build both archives and return their paths. Raises if the sdist builds another wheel than the checkout."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in [*_run(["git", "ls-files", *FOLDERS]).splitlines(), *(BESIDE - {"PKG-INFO"})]:
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(DIST)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
        _run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)])
        _require((Path(folder) / wheel.name).read_bytes() == wheel.read_bytes(), "the sdist builds another wheel")
    return wheel, sdist


def build_native(pure: Path) -> Path | None:
    """Put the library of CPU kernels into a copy of the pure wheel; None where there is no compiler.

    The library is compiled, unless the checkout has one of these sources. The platform's tag names the oldest glibc
    that the library's symbols need.
    """
    sources = native.digest_of_sources()
    if not (sources and LIBRARY.exists() and sources.encode() in LIBRARY.read_bytes()):
        try:
            native.build()
        except native.CannotBuild as error:
            print(f"no wheel with CPU kernels: {error}")
            return None
    symbols = _run(["objdump", "-T", str(LIBRARY)])
    major, minor = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
    tag = f"manylinux_{major}_{max(minor, 17)}_x86_64"
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "zipfile", "-e", str(pure), folder])
        (about,) = Path(folder).glob("*.dist-info")
        shutil.copy2(LIBRARY, Path(folder, "pallas_kernels", "cpu", LIBRARY.name))
        text = (about / "WHEEL").read_text()
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").replace(
            "py3-none-any", f"py3-none-{tag}"
        )
        (about / "WHEEL").write_text(text)
        content = Path(folder, "pallas_kernels", "cpu", LIBRARY.name).read_bytes()
        target = pure.with_name(pure.name.replace("py3-none-any", f"py3-none-{tag}"))
        _write_wheel(Path(folder), about, target)
    with zipfile.ZipFile(target) as archive:
        _require(archive.read(f"pallas_kernels/cpu/{LIBRARY.name}") == content, "the wheel has another library")
    return target


def _write_wheel(folder: Path, about: Path, target: Path) -> None:
    """Write a wheel of the files in a folder, and its list of them with their digests."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    record = f"{about.name}/RECORD"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        lines = []
        for name in names:
            if name != record:
                content = (folder / name).read_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                lines.append(f"{name},sha256={digest},{len(content)}")
                archive.writestr(zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(record, (2020, 2, 2, 0, 0, 0)), "\n".join([*lines, f"{record},,", ""]))


def check_files(wheel: Path, sdist: Path) -> None:
    """Raise if an archive lacks a file, or holds a file that it must not hold."""
    tracked = set(_run(["git", "ls-files", *FOLDERS]).splitlines())
    shipped = {re.sub("^server/", "jswa/_server/", name) for name in tracked}
    _require(shipped >= TYPED, f"no {TYPED - shipped}")
    with zipfile.ZipFile(wheel) as archive:
        _same({name for name in archive.namelist() if ".dist-info/" not in name}, shipped, wheel)
    with tarfile.open(sdist) as archive:
        _same({name.partition("/")[2] for name in archive.getnames()}, tracked | BESIDE, sdist)


def check_commands(python: Path, wheel: Path) -> None:
    """Install the wheel beside its dependencies and run what a first user runs. Raises if a command fails."""
    _run([str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel)])
    _run([str(python), "-m", "pip", "check"])
    jswa = str(python.parent / "jswa")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([str(python), "-c", "import jswa, pallas_kernels"], folder)
        _require(_run([jswa, "generate", "a", *SMALL], folder).strip() != "", "`jswa generate` gives no text")
        _check_server(jswa, folder)


def _check_server(jswa: str, folder: Path) -> None:
    """One completion over HTTP on loopback, then SIGTERM: the process must end with status 0."""
    command = [jswa, "serve", "tiny", "--port", "0", *SMALL]
    with subprocess.Popen(command, cwd=folder, env=_environ(folder), stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            log = []
            for line in server.stderr:
                log.append(line)
                if found := re.search(r"listening on (http://[\w.:]+)", line):
                    break
            else:
                raise SystemExit("the server does not start:\n" + "".join(log))
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 4}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(found[1] + "/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                _require(json.load(response)["choices"][0]["text"] != "", "the server gives no text")
            server.send_signal(signal.SIGTERM)
            log.append(server.stderr.read())
            _require(server.wait(30) == 0, "the server ends with an error:\n" + "".join(log))
        finally:
            server.kill()


def _same(found: set[str], expected: set[str], archive: Path) -> None:
    _require(found == expected, f"{archive.name} lacks {expected - found}, has also {found - expected}")


def _require(law: bool, message: str) -> None:
    if not law:
        raise SystemExit(message)


def _environ(home: Path) -> dict[str, str]:
    """No PYTHONPATH, no JSWA_ variable, nothing in the home folder."""
    return {"HOME": str(home), "PATH": "/usr/bin:/bin"}


def _run(command: Sequence[str], home: Path | None = None) -> str:
    """Return a command's output: one of the checkout's, or, with `home`, one in an empty folder."""
    environ = None if home is None else _environ(home)
    return subprocess.run(command, cwd=home or ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    wheel, sdist = build()
    check_files(wheel, sdist)
    check_commands(Path(sys.argv[1]).absolute(), wheel)
    with_kernels = build_native(wheel)
    if with_kernels is not None:
        check_commands(Path(sys.argv[1]).absolute(), with_kernels)
    archives = [wheel, sdist, *([] if with_kernels is None else [with_kernels])]
    print("\n".join(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes" for path in archives))
