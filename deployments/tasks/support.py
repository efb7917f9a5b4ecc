"""Helpers that several tasks and bridges share."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def assigned_cores() -> int:
    """The `num_cpus` of the replica, rounded up to whole cores and at least 1; 1 outside of a replica."""
    # Worker processes are forked from a process that has imported the task's module: they need no Ray.
    import ray

    if not ray.is_initialized():
        return 1
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return 1
    resources: dict[str, float] = context.get_assigned_resources()  # type: ignore[no-untyped-call]
    return max(1, math.ceil(resources.get("CPU", 0.0)))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers from 1 on, without a byte-order mark.

    Lines end at \\n only: a text may contain U+0085 and U+2028, at which other readers split too.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield number, content


class PackageMissing(Exception):
    """The message says how the package is installed."""


def imported(module_name: str, package: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        PackageMissing: the package is not installed.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise PackageMissing(
            f"the package {package} is missing: install the extra `bridges` of the service on each node "
            "(pip install --no-deps --require-hashes -r requirements/bridges.lock)"
        ) from error
