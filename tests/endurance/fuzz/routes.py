"""Schemathesis against one route: requests that its OpenAPI description allows, and some that it forbids."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from service.startup.config import REPOSITORY
from tests.endurance.fuzz.fuzzed_service import FuzzedService

CONFIG = Path(__file__).with_name("schemathesis.toml")
TAGS_OF_AGENTS = frozenset({"model server", "sessions"})
"""Of the routes that need a real engine."""
AT_ONCE = os.cpu_count() or 1
"""Runs, each in a process of its own: schemathesis takes longer to make a request than the service to answer it."""
RUN_TIMEOUT_S = 3600
SHOWN = 600


def operations(url: str, of_agents: bool) -> dict[str, str]:
    """Method and path by operation id, of the routes of agents or of all others."""
    paths: Mapping[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    return {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method, operation in methods.items()
        if of_agents == bool(TAGS_OF_AGENTS.intersection(operation["tags"]))
    }


def fuzz_route(operation_id: str, cases: int, service: FuzzedService) -> tuple[int, list[str]]:
    """About so many requests, fewer where schemathesis finds no further ones."""
    run = partial(schemathesis_run, service, operation_id, -(-cases // AT_ONCE))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(run, range(AT_ONCE)))
    return sum(sent for sent, _ in ended), [problem for _, problems in ended for problem in problems]


def schemathesis_run(service: FuzzedService, operation_id: str, cases: int, number: int) -> tuple[int, list[str]]:
    # The examples and the coverage of the description are the same in each run.
    phases = "fuzzing" if number else "examples,coverage,fuzzing"
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        report = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{service.url}/openapi.json", "--include-operation-id", operation_id, "--phases", phases),
            *("--max-examples", str(cases), "--seed", str(number)),
            *("--report", "json", "--report-json-path", str(report), "--no-color"),
            *(f"--header={name}: {value}" for name, value in service.headers.items()),
        ]
        # It runs elsewhere, because it writes into its folder, and imports its hooks from here.
        path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
        ended = subprocess.run(
            command, cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
        )
        if not report.exists():
            return 0, [f"schemathesis broke off: {ended.stdout[-SHOWN:]}{ended.stderr[-SHOWN:]}"]
        found = json.loads(report.read_text())
    problems = [f"{failure['title']} ({failure['count']})" for failure in found["failures"] + found["errors"]]
    if problems:
        sys.stderr.write(ended.stdout)
    return found["test_cases"]["generated"], problems
