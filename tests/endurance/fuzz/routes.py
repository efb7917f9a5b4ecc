"""Schemathesis against one route: requests that its OpenAPI description allows, and some that it forbids."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.tree import REPOSITORY
from tests.endurance.fuzz.tally import Tally

CONFIG = Path(__file__).with_name("schemathesis.toml")
TAGS_OF_AGENTS = frozenset({"model server", "sessions"})
"""Of the routes that need a real engine."""
AT_ONCE = os.cpu_count() or 1
"""Runs, each in a process of its own: schemathesis takes longer to make a request than the service to answer it."""
RUN_TIMEOUT_S = 3600
SHOWN = 600
FIRST_PHASES, LATER_PHASES = "examples,coverage,fuzzing", "fuzzing"


def operations(url: str, of_agents: bool) -> dict[str, str]:
    """Method and path by operation id, of the routes of agents or of all others."""
    paths: Mapping[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    return {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method, operation in methods.items()
        if of_agents == bool(TAGS_OF_AGENTS.intersection(operation["tags"]))
    }


def fuzz_route(url: str, operation_id: str, cases: range, seed: int, headers: Mapping[str, str]) -> Tally:
    """About as many requests as `cases` has numbers, fewer where schemathesis finds no further ones."""
    shares = shared(cases, AT_ONCE)
    tally = Tally()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for played in pool.map(partial(schemathesis_run, url, operation_id, seed, headers), shares):
            tally.add(played)
    return tally


def shared(cases: range, shares: int) -> list[range]:
    """The numbers in so many ranges of about one length, without empty ones."""
    bounds = [cases.start + len(cases) * number // shares for number in range(shares + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds) if begin < end]


def schemathesis_run(url: str, operation_id: str, seed: int, headers: Mapping[str, str], cases: range) -> Tally:
    # The examples and the coverage of the description are the same in each run.
    phases = FIRST_PHASES if cases.start == 0 else LATER_PHASES
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        report = Path(folder, "report.json")
        arguments = [f"--header={name}: {value}" for name, value in headers.items()]
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{url}/openapi.json"),
            *("--include-operation-id", operation_id, "--phases", phases),
            *("--max-examples", str(len(cases)), "--seed", str(seed + cases.start)),
            *("--report", "json", "--report-json-path", str(report), "--no-color", *arguments),
        ]
        # It runs elsewhere, because it writes into its folder, and imports its hooks from here.
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
        )
        if not report.exists():
            return Tally(problems=[f"schemathesis broke off: {ended.stdout[-SHOWN:]}{ended.stderr[-SHOWN:]}"])
        found = json.loads(report.read_text())
    problems = [f"{failure['title']} ({failure['count']})" for failure in found["failures"] + found["errors"]]
    if problems:
        sys.stderr.write(ended.stdout)
    return Tally(found["test_cases"]["generated"], problems)
