"""Results that count over several runs: one JSON line each, in a file that all runs append to."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout_client.json_lines import numbered_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")


def append(path: Path, result: "DataclassInstance") -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path, kind: type[Result]) -> list[Result]:
    """The results of all runs; none if there is no file yet."""
    if not path.exists():
        return []
    with path.open("rb") as lines:
        return [kind(**json.loads(line)) for _, line in numbered_lines(lines)]
