"""A Prometheus that reads a running service, and what it says of a query over time."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from service.startup.config import free_port

QUERY_TIMEOUT_S = 10.0
ENDS_WITHIN_S = 10.0


class PrometheusMissing(Exception):
    """The program is not installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    labels: dict[str, str]
    times_s: list[float]
    values: list[float]


@contextmanager
def prometheus(service_url: str, folder: Path, every: str) -> Iterator[str]:
    """The address of one that keeps its data in `folder` and reads the service `every` so long, such as `2s`.

    Raises:
        PrometheusMissing: the program `prometheus` is not on the path.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise PrometheusMissing("There is no program prometheus: install the package of that name (Debian).")
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every},
        "scrape_configs": [
            {"job_name": "rollout", "static_configs": [{"targets": [service_url.removeprefix("http://")]}]}
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    port = free_port()
    command = [program, f"--config.file={path}", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(ENDS_WITHIN_S)


def lines_of(url: str, query: str, begin_s: float, end_s: float, step_s: float) -> list[Line]:
    """The series that a panel with that query draws between two times of the epoch."""
    asked: dict[str, str | float] = {"query": query, "start": begin_s, "end": end_s, "step": step_s}
    answer = httpx.get(f"{url}/api/v1/query_range", params=asked, timeout=QUERY_TIMEOUT_S).raise_for_status()
    return list(map(line_of, answer.json()["data"]["result"]))


def line_of(found: dict[str, Any]) -> Line:
    times, values = zip(*found["values"], strict=True)
    return Line(found["metric"], [float(at_s) for at_s in times], [float(value) for value in values])
