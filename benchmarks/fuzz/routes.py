"""Schemathesis against one route: requests that its OpenAPI description allows, and some that it forbids."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fuzz.tally import Tally

CONFIG = Path(__file__).with_name("schemathesis.toml")
TAGS_OF_AGENTS = frozenset({"model server", "sessions"})
"""Of the routes that need a real engine."""
MOST_ROUNDS = 12
"""Schemathesis ends a round early when it finds nothing new: the next one has another seed."""
CASES_A_ROUND = 1000
AT_ONCE = os.cpu_count() or 1
"""Rounds, each in a process of its own: schemathesis takes longer to make a request than the service to answer it."""
ROUND_TIMEOUT_S = 900
FAILURE = re.compile(r"^- (?P<title>.+?)\n\n(?P<text>.*?)(?=\n\n\[|\nReproduce with)", re.MULTILINE | re.DOTALL)
ERROR = re.compile(
    r"^_{3,} [^\n]+ _{3,}\n(?P<title>(?!\d+\. )[^\n]+)\n\n(?P<text>.*?)(?=\n\nNeed more help|\n={3,}|\n_{3,})",
    re.MULTILINE | re.DOTALL,
)
SHOWN = 600
PHASES, LATER_PHASES = "examples,coverage,fuzzing", "fuzzing"


def operations(url: str, of_agents: bool) -> dict[str, str]:
    """Method and path by operation id, of the routes of agents or of all others."""
    paths: Mapping[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    return {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method, operation in methods.items()
        if of_agents == bool(TAGS_OF_AGENTS.intersection(operation["tags"]))
    }


def fuzz_route(url: str, operation_id: str, cases: int, seed: int, headers: Mapping[str, str]) -> Tally:
    """At least `cases` requests to the route, unless `MOST_ROUNDS` rounds have not that many."""
    tally = Tally()
    with ThreadPoolExecutor(AT_ONCE) as rounds:
        for first in range(0, MOST_ROUNDS, AT_ONCE):
            if tally.cases >= cases:
                break
            wanted = min(CASES_A_ROUND, -(-(cases - tally.cases) // AT_ONCE))
            play = partial(schemathesis_round, url, operation_id, wanted, seed, headers)
            for played in rounds.map(play, range(first, first + AT_ONCE)):
                tally.add(played)
    return tally


def schemathesis_round(
    url: str, operation_id: str, cases: int, seed: int, headers: Mapping[str, str], number: int
) -> Tally:
    # Its examples and its coverage of the description are the same in each round.
    phases = PHASES if number == 0 else LATER_PHASES
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        report = Path(folder, "report.json")
        arguments = [f"--header={name}: {value}" for name, value in headers.items()]
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{url}/openapi.json"),
            *("--include-operation-id", operation_id, "--max-examples", str(cases), "--seed", str(seed + number)),
            *("--phases", phases),
            *("--report", "json", "--report-json-path", str(report), "--no-color", *arguments),
        ]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=ROUND_TIMEOUT_S)
        if not report.exists():
            return Tally(problems=[f"schemathesis broke off: {ended.stdout[-SHOWN:]}{ended.stderr[-SHOWN:]}"])
        found = json.loads(report.read_text())
    problems = [f"{failure['title']} ({failure['count']})" for failure in found["failures"] + found["errors"]]
    shown = list(failures_in(ended.stdout)) if problems else []
    return Tally(found["test_cases"]["generated"], shown or problems)


def failures_in(output: str) -> Iterator[str]:
    """Each failure that schemathesis prints, with what was expected, and each request that had no answer."""
    for match in [*FAILURE.finditer(output), *ERROR.finditer(output)]:
        yield f"{match['title']}: {' '.join(match['text'].split())}"[:SHOWN]
