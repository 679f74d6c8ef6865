"""The files of the pages, as the server sends them: without a key, since they have no secrets, and to this origin only.

The pages load nothing from other addresses. Their Content-Security-Policy forbids it, and forbids scripts and styles in
the HTML and every conversion of text to HTML.
"""

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "files"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask each time whether a file has changed
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}
# By the path of their routes.
PAGES = {
    "/": "chat.html",
    "/live": "live.html",
    **{f"/pages/{path.name}": path.name for path in sorted(_FOLDER.iterdir()) if path.suffix != ".html"},
}


class File(NamedTuple):
    """A file, also compressed, with a tag that changes with its content."""

    content: bytes
    compressed: bytes
    tag: str
    media_type: str


async def page(request: Request) -> Response:
    """Return the file of a path in `PAGES`."""
    file = _file(PAGES[request.scope["jswa.found"].route.path])
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)


@cache
def _file(name: str) -> File:
    path = _FOLDER / name
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return File(content, gzip.compress(content, 9, mtime=0), tag, _TYPES[path.suffix])
