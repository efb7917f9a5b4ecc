"""The file to which groups are appended, and beside it what run it is of. One process has it at a time."""

import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic_core import from_json, to_json

from rollout_client.cli.run.recovery import Recovered, recovered

NOT_OF_A_RUN = frozenset({"priority", "sample_retries"})
"""Options that change when rollouts end, not what they are: a run may go on with others."""


def run_of(samples: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for a run to go on: the samples, by their digest, and how they are played."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(to_json(sample) + b"\n")
    kept = {name: value for name, value in options.items() if name not in NOT_OF_A_RUN and value not in (None, {})}
    run = {"samples": len(samples), "samples_sha256": digest.hexdigest(), "options": kept}
    return from_json(to_json(run))  # type: ignore[no-any-return]


class ResultsFile:
    """Use it as a context manager: it is locked for the length of the block.

    Args:
        path: of the results; `{path}.run.json` says which run they are of.

    Raises:
        ValueError: another process writes it, or it is of another run.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], overwrite: bool = False) -> None:
        self._path = path
        self._run_path = path.with_name(f"{path.name}.run.json")
        self._run = run
        self._overwrite = overwrite
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise ValueError(f"{self._path} is being written by another rollout run.") from error
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def recover(self, num_generations: int) -> Recovered:
        """Cuts off what a kill left of a group; begins the file if it is empty."""
        if self._overwrite:
            os.truncate(self._descriptor, 0)
        if os.fstat(self._descriptor).st_size == 0:
            self._write_run()
        self._check_run()
        try:
            with self._path.open("rb") as lines:
                found = recovered(lines, num_generations)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}. Begin anew with --overwrite, or name another file.") from error
        os.truncate(self._descriptor, found.kept_bytes)
        return found

    def append(self, data: bytes) -> None:
        """Returns when `data` is on the disk."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)

    def _write_run(self) -> None:
        """Whole or not at all, and before the first result."""
        written = self._run_path.with_name(f"{self._run_path.name}.new")
        with written.open("wb") as file:
            file.write(to_json(self._run, indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._run_path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _check_run(self) -> None:
        advice = "Begin anew with --overwrite, or name another file."
        if not self._run_path.exists():
            raise ValueError(f"{self._path} is there, and no {self._run_path.name} says of which run it is. {advice}")
        found = from_json(self._run_path.read_bytes())
        if any(found.get(name) != self._run[name] for name in ("samples", "samples_sha256")):
            raise ValueError(f"{self._path} is of a run with other samples. {advice}")
        if found.get("options") != self._run["options"]:
            raise ValueError(
                f"{self._path} is of a run with other options: {to_json(found['options']).decode()}. {advice}"
            )
