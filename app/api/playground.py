"""The page at `/` and its files: read once at start, compressed once, served with a strict content security policy.

Knows the files of `app/playground` and HTTP headers; does not know what the page does.
"""

import gzip
import hashlib
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER = Path(__file__).resolve().parent.parent / "playground"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class Asset:
    """One file: its bytes, the same compressed, and a tag that changes with its content."""

    def __init__(self, path: Path) -> None:
        self.plain = path.read_bytes()
        self.packed = gzip.compress(self.plain, 9, mtime=0)
        self.type = TYPES[path.suffix]
        self.tag = f'"{hashlib.sha256(self.plain).hexdigest()[:20]}"'

    def response(self, request: Request) -> Response:
        """The file as the client can take it: 304 when it has it already."""
        headers = HEADERS | {"ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, media_type=self.type, headers=headers | {"Content-Encoding": "gzip"})
        return Response(self.plain, media_type=self.type, headers=headers)


ASSETS = {
    path.relative_to(FOLDER).as_posix(): Asset(path)
    for path in sorted(FOLDER.rglob("*"))
    if path.is_file() and path.suffix in TYPES
}

router = APIRouter(include_in_schema=False)


@router.get("/")
def index(request: Request) -> Response:
    """The page itself."""
    return ASSETS["index.html"].response(request)


@router.get("/playground/{name:path}")
def asset(name: str, request: Request) -> Response:
    """One of its files. Raises HTTPException 404 for a name that is none of them."""
    if name not in ASSETS:
        raise HTTPException(404, f"The playground has no file {name!r}.")
    return ASSETS[name].response(request)
