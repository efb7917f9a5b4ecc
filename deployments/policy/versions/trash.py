"""Files that are needed no more. To free gigabytes takes seconds, so it is done apart, in a thread.

Guarantees: what is discarded is gone from its place at once, by one rename; what a store leaves here when it dies is
deleted by the next one.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class Trash:
    """Args: `folder` is the version store's, in which everything lies that is discarded."""

    folder: Path

    def discard(self, path: Path) -> None:
        """Moves a file or a folder out of its place; one that does not exist is ignored."""
        self._place.mkdir(parents=True, exist_ok=True)
        try:
            path.rename(self._place / uuid4().hex)
        except FileNotFoundError:
            return

    def empty(self) -> None:
        """Deletes what was discarded. Call it from a thread."""
        try:
            discarded = list(self._place.iterdir())
        except FileNotFoundError:
            return
        for path in discarded:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @property
    def _place(self) -> Path:
        return self.folder / "removing"
