"""The files of the page, read once into memory: no request can name another file, whatever its path says."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
class PageFile:
    content: bytes
    media_type: str
    etag: str
    """Changes with the content."""


@cache
def page_files() -> Mapping[str, PageFile]:
    """By path below `/ui/`, with `/` between folders."""
    return {
        path.relative_to(PAGE).as_posix(): page_file(path)
        for path in PAGE.rglob("*")
        if path.is_file() and path.suffix in MEDIA_TYPES
    }


def page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
