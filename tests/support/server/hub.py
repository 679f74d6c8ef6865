"""A server that speaks the protocol of the Hugging Face Hub, as far as downloads need it, with faults on request."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


@dataclass
class Hub:
    """Repositories by name, each a folder, and what is wrong with the answers.

    Attributes:
        url: value for HF_ENDPOINT.
        gated, private: names of repositories that need TOKEN.
        revisions: branches, tags and commits of all repositories.
        cuts: bytes of a file after which connections are cut, one after the other, by file name.
        wrong: bodies that are sent in place of files, by file name.
        ranges: parts of files are sent, as Range headers ask for them.
        status: status of every answer, if it is not 200.
        wait: seconds before each answer.
        requests: method, path, and Range header of all requests.
    """

    folders: dict[str, Path]
    url: str = ""
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    status: int = 200
    wait: float = 0.0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def files(self, name: str) -> dict[str, Path]:
        """Return the files of a repository by path."""
        root = self.folders[name]
        return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}

    def got(self, method: str = "GET") -> set[str]:
        """Return the names of the files that were asked for."""
        return {
            path.split(f"/resolve/{COMMIT}/")[1]
            for verb, path, _ in self.requests
            if verb == method and "/resolve/" in path
        }

    def got_parts(self, name: str) -> list[tuple[int, int]]:
        """Return first byte and byte after the last of each part of a file that was asked for; -1 is its end."""
        asked = [part for verb, path, part in self.requests if verb == "GET" and path.endswith(f"/{name}")]
        return [_range(part) for part in asked]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve on a free port of this machine; `hub.url` is set."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        time.sleep(hub.wait)
        if hub.status != 200:
            return self._send(hub.status, b"no", {}, body=body)
        api = path.startswith("/api/models/")
        owner, name, kind, revision, *rest = path.removeprefix("/api/models/").strip("/").split("/") + [""] * 2
        repository = f"{owner}/{name}"
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository not in hub.folders or (repository in hub.private and not allowed):
            return self._send(401, b"Repository not found", {"X-Error-Code": "RepoNotFound"}, body=body)
        if revision not in hub.revisions:
            return self._send(404, b"Revision not found", {"X-Error-Code": "RevisionNotFound"}, body=body)
        if api:
            return self._json(repository, kind, body=body)
        if repository in hub.gated and not allowed:
            return self._send(401, b"Access is restricted", {"X-Error-Code": "GatedRepo"}, body=body)
        file = "/".join(part for part in rest if part)
        if file not in hub.files(repository):
            return self._send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"}, body=body)
        return self._file(file, hub.files(repository)[file].read_bytes(), body=body)

    def _json(self, repository: str, kind: str, *, body: bool) -> None:
        files = self.hub.files(repository)
        found: object = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        if kind == "tree":
            found = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path.read_bytes())}
                for name, path in files.items()
            ]
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body=body)

    def _file(self, name: str, content: bytes, *, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(content)}"', "Accept-Ranges": "bytes"}
        length, content = len(content), self.hub.wrong.get(name, content)
        if not body:
            return self._send(200, b"", {**headers, "Content-Length": str(length)}, body=False)
        asked = self.headers.get("Range") if self.hub.ranges else None
        begin, end = _range(asked)
        last = len(content) if end < 0 else min(end, len(content))
        if asked is not None:
            headers["Content-Range"] = f"bytes {begin}-{last - 1}/{len(content)}"
        cuts = self.hub.cuts.get(name)
        cut = cuts.pop(0) if cuts else None
        self._send(
            200 if asked is None else 206,
            content[begin : last if cut is None else begin + cut],
            {**headers, "Content-Length": str(last - begin)},
            body=True,
        )
        if cut is not None:
            self.close_connection = True

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _range(header: str | None) -> tuple[int, int]:
    """Return first byte and byte after the last of a Range header; -1 is the end of the file."""
    first, _, last = (header or "bytes=0-").removeprefix("bytes=").partition("-")
    return int(first), int(last) + 1 if last else -1
