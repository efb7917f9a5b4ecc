"""`GET /ui`: a page that shows the service, plays samples and reads rollouts.

The files are read once into memory: no request can name another file, whatever its path says. They need no key and hold
no data. What the page shows it gets from the other routes, with the key of whoever uses it. Text of models is shown
there: the page may run its own files only, and ask only the service that it came from.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
"""By suffix. Files of other suffixes are not part of the page; those without one are licences."""


@dataclass(frozen=True, slots=True)
class _PageFile:
    content: bytes
    media_type: str
    etag: str
    """Changes with the content."""


@cache
def page_files() -> Mapping[str, _PageFile]:
    """By path below `/ui/`, with `/` between folders."""
    return {
        path.relative_to(PAGE).as_posix(): _page_file(path)
        for path in PAGE.rglob("*")
        if path.is_file() and path.suffix in MEDIA_TYPES
    }


def _page_file(path: Path) -> _PageFile:
    content = path.read_bytes()
    return _PageFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # Images of rollouts are fetched with the caller's key, which an <img> does not send.
        "img-src 'self' blob:",
        "connect-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup or code nowhere; the one policy is for the address of the worker.
        "require-trusted-types-for 'script'",
        "trusted-types rollout-worker",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again each time, answered by 304: a page never mixes the modules of two versions.
    "Cache-Control": "no-cache",
}


async def _ui(request: Request) -> Response:
    """Relative, so that it is right under every prefix and behind every gateway."""
    query = f"?{request.url.query}" if request.url.query else ""
    return Response(status_code=307, headers={"Location": f"ui/{query}"})


async def _ui_file(request: Request) -> Response:
    """Raises `HTTPException`: 404 for a path that is not a file of the page."""
    file = page_files().get(request.path_params["path"] or INDEX)
    if file is None:
        raise HTTPException(404, "Not Found")
    headers = {**HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


router = APIRouter()
# Not as routes of the API: they are in no OpenAPI document, and read no parameters.
router.add_route("/ui", _ui, methods=["GET"], include_in_schema=False)
router.add_route("/ui/{path:path}", _ui_file, methods=["GET"], include_in_schema=False)
