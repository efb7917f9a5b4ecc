"""Images of rollouts as files of one folder: `image_file`."""

from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from rollout_client.errors import StatusError

NAME_PREFIX = "sha256:"
SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpeg", b"RIFF": ".webp"}
"""By how a file begins; the service takes these three."""


def image_file(folder: Path, fetch: Callable[[str], bytes], name: str) -> Path | None:
    """The path of an image in `folder`; `None` if neither the folder nor the service has it.

    Args:
        folder: keeps the images that it lacks; made with the first one.
        fetch: `client.image`; what it raises is raised.
    """
    path = folder / name.removeprefix(NAME_PREFIX)
    for suffix in SUFFIXES.values():
        if (kept := path.with_suffix(suffix)).exists():
            return kept
    try:
        content = fetch(name)
    except StatusError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise
    new = path.with_suffix(next(suffix for start, suffix in SUFFIXES.items() if content.startswith(start)))
    folder.mkdir(parents=True, exist_ok=True)
    partial = new.with_suffix(".part")
    partial.write_bytes(content)
    return partial.replace(new)
