"""The results file of a run: groups are appended to it, and it is recovered after a kill. One process has it at a time.

A second file beside it identifies the run. A group is appended in one piece; those that end while the disk is busy are
written together. A kill can leave any part of the last piece: that part is cut off, and its group is played again.
Anything else that is not in order was not written by a run, and is an error.
"""

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json, to_json

from rollout_client.cli.run.plan import INPUT_ROW, input_row
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import json_line, parts_of_lines


@dataclass(slots=True)
class Recovered:
    kept_bytes: int = 0
    """Length of the whole groups, at the beginning of the file."""
    rows: set[int] = field(default_factory=set)
    """The rows of the input whose groups they are."""
    totals: Totals = field(default_factory=Totals)


def recovered(lines: Iterable[bytes], group_size: int) -> Recovered:
    """Reads the lines of the file, each with its end.

    Raises `ValueError` that names the line which no run with groups of this size wrote.
    """
    found = Recovered()
    group: list[SampleResult] = []
    for number, (rollout, end) in enumerate(parts_of_lines(lines, may_be_torn=True), start=1):
        row = input_row(rollout)
        if not isinstance(rollout, SampleResult) or not isinstance(row, int):
            raise ValueError(f"line {number} has no {INPUT_ROW}")
        generation = rollout.generation_index
        if generation != len(group) or row in found.rows or any(input_row(other) != row for other in group):
            raise ValueError(f"line {number} has generation {generation} of row {row}, which does not come there")
        group.append(rollout)
        if len(group) == group_size:
            found.rows.add(row)
            found.kept_bytes = end
            for ended in group:
                found.totals.add(ended)
            group = []
    return found


ADVICE = "Begin anew with --overwrite, or name another file."
NOT_OF_A_RUN = frozenset({"priority", "sample_retries"})
"""Options that change when rollouts end, not what they are: a run may go on with others."""


def run_of(samples: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run: its samples, by their digest, and how they are played. It goes on only if it is equal."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(to_json(sample) + b"\n")
    kept = {name: value for name, value in options.items() if name not in NOT_OF_A_RUN and value not in (None, {})}
    run = {"samples": len(samples), "samples_sha256": digest.hexdigest(), "options": kept}
    return from_json(to_json(run))  # type: ignore[no-any-return]


class ResultsFile:
    """The file at `path`, and `{path}.run.json`, which says which run it is of."""

    def __init__(self, path: Path, run: Mapping[str, Any], overwrite: bool = False) -> None:
        self._path = path
        self._run_path = path.with_name(f"{path.name}.run.json")
        self._run = run
        self._overwrite = overwrite
        self._descriptor = -1
        self._waiting: list[bytes] = []
        self._is_writing = asyncio.Lock()

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """Holds the file for the length of the block. Raises `ValueError` if another process writes it."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield self
        except BlockingIOError as error:
            raise ValueError(f"{self._path} is being written by another rollout run.") from error
        finally:
            os.close(self._descriptor)

    def recover(self, group_size: int) -> Recovered:
        """Cuts off what a kill left of a group; begins the file if it is empty."""
        if self._overwrite:
            os.truncate(self._descriptor, 0)
        if os.fstat(self._descriptor).st_size == 0:
            # Whole or not at all, and before the first result.
            written = self._run_path.with_name(f"{self._run_path.name}.new")
            written.write_bytes(to_json(self._run, indent=1) + b"\n")
            written.replace(self._run_path)
        self._check_run()
        try:
            with self._path.open("rb") as lines:
                found = recovered(lines, group_size)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}. {ADVICE}") from error
        os.truncate(self._descriptor, found.kept_bytes)
        return found

    async def append(self, row: int, group: list[SampleResult]) -> None:
        """Returns when the group of `row` is on the disk."""
        self._waiting.extend(json_line(sample, **{INPUT_ROW: row}) for sample in group)
        async with self._is_writing:
            lines, self._waiting = self._waiting, []
            if lines:
                await asyncio.to_thread(self._write, b"".join(lines))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)

    def _check_run(self) -> None:
        found = from_json(self._run_path.read_bytes()) if self._run_path.exists() else None
        if found is None:
            problem = f"exists, but {self._run_path.name}, which names its run, does not"
        elif any(found.get(name) != self._run[name] for name in ("samples", "samples_sha256")):
            problem = "is of a run with other samples"
        elif found.get("options") != self._run["options"]:
            problem = f"is of a run with other options: {to_json(found['options']).decode()}"
        else:
            return
        raise ValueError(f"{self._path} {problem}. {ADVICE}")
