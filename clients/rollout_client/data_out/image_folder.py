"""Images of rollouts as files of one folder: `ImageFolder`."""

from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from rollout_client.errors import StatusError

NAME_PREFIX = "sha256:"
SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpeg", b"RIFF": ".webp"}
"""By how a file begins; the service takes these three."""


class ImageFolder:
    """Files of images by name. Those that the folder lacks are fetched and kept there.

    Args:
        folder: is made with the first image.
        fetch: `client.image`.
    """

    def __init__(self, folder: str | Path, fetch: Callable[[str], bytes]) -> None:
        self._folder = Path(folder)
        self._fetch = fetch

    def file(self, name: str) -> Path | None:
        """The path of an image; `None` if neither the folder nor the service has it. Raises what `fetch` raises."""
        path = self._folder / name.removeprefix(NAME_PREFIX)
        for suffix in SUFFIXES.values():
            if (kept := path.with_suffix(suffix)).exists():
                return kept
        try:
            content = self._fetch(name)
        except StatusError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        new = path.with_suffix(next(suffix for start, suffix in SUFFIXES.items() if content.startswith(start)))
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = new.with_suffix(".part")
        partial.write_bytes(content)
        return partial.replace(new)
