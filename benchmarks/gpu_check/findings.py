"""What a check of a GPU found: written as it is found, because a check that dies has to leave what it knew."""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class GpuFinding:
    part: str
    subject: str
    held: bool | None
    """`None` for what was only measured."""
    figures: dict[str, Any] = field(default_factory=dict)


class Findings:
    """Those of one part, as lines of JSON in a file."""

    def __init__(self, part: str, path: Path) -> None:
        self._part = part
        self._path = path
        self._began = time.monotonic()

    def add(self, subject: str, held: bool | None = None, **figures: Any) -> None:
        finding = GpuFinding(self._part, subject, held, {**figures, "at_s": round(time.monotonic() - self._began, 1)})
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(finding), default=str) + "\n")
        mark = {True: "held", False: "[red]did not hold[/]", None: "measured"}[held]
        console.print(f"{self._part}: {subject}: {mark} {finding.figures}", soft_wrap=True)

    @contextmanager
    def attempt(self, subject: str) -> Iterator[None]:
        """What is raised in the block is a finding, and the part goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever breaks on an unknown machine is to be reported
            traceback.print_exc()
            self.add(subject, False, error=f"{type(error).__name__}: {error}"[:2000])


def read_findings(path: Path) -> list[GpuFinding]:
    if not path.exists():
        return []
    return [GpuFinding(**json.loads(line)) for line in path.read_text().splitlines()]
