"""`rollout env certify` finds thirty planted faults, each by the check that is named so, and passes their twins."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout_env.__main__ import HARBOR_TASKS
from rollout_env.certificate import Certificate
from rollout_env.certify import PanelSettings, certify
from rollout_env.loading import certified_environment
from rollout_env.play import run
from tests.clients.rollout_env.planted_environments import BatchedSum, Count, Programs, Sum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
OF_SUM = [(fault, fault) for fault in ("empty", "echo", "format_alone", "all_answers", "oracle", "injection", "flood")]
OF_SUM += [("forged", "injection"), ("no_op", "no_op"), ("outcome", "outcome"), ("equal_plays", "equal_plays")]
OF_BATCHED_SUM = ["state", "two_processes", "time_limits", "blocking", "rejected_input", "after_any_end"]
OF_COUNT = ["time_limits", "after_any_end", "resume"]
OF_PROGRAMS = ["hidden_files", "hidden_variables", "network", "left_behind", "reward_files"]
FAULTS = [
    *((Sum, fault, check) for fault, check in OF_SUM),
    *((BatchedSum, fault, fault) for fault in OF_BATCHED_SUM),
    *((Count, fault, fault) for fault in OF_COUNT),
    *((Programs, fault, fault) for fault in OF_PROGRAMS),
]
SECRET = "the key of the judge"
RIGHT = "echo 1 > /logs/verifier/reward.txt"
CHECK = f'[ "$(cat /app/answer)" = 7 ] && {RIGHT} || echo 0 > /logs/verifier/reward.txt\n'
HARBOR_FAULTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "the image has the tests": (
        "hidden_files",
        {
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY test.sh /opt/\n",
            "environment/test.sh": f"#!/bin/bash\n{CHECK}",
        },
    ),
    "the image has the solution": (
        "hidden_files",
        {
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY s /opt/\n",
            "environment/s": "echo 7 > /app/answer\n",
        },
    ),
    "the agent has the verifier's key": (
        "hidden_variables",
        {"task.toml": f'[environment.env]\nKEY = "{SECRET}"\n[verifier.env]\nJUDGE_KEY = "{SECRET}"\n'},
    ),
    "the tests read a score that the agent can write": (
        "reward_files",
        {"tests/test.sh": f"{CHECK}[ -f /app/score.txt ] && cp /app/score.txt /logs/verifier/reward.txt\nexit 0\n"},
    ),
    "the tests import modules of the agent": (
        "reward_files",
        {"tests/test.sh": f"{CHECK}cd /app; PYTHONPATH=. python3 -c 'raise SystemExit(1)' && {RIGHT}\n"},
    ),
}


def certified(make: Any, check: str = "", **settings: Any) -> Certificate:
    panel = PanelSettings(samples=2, step_timeout_s=4.0, only=[check] if check else [], **settings)
    return run(certify("planted", make, {}, panel))


def failed(certificate: Certificate) -> dict[str, list[str]]:
    return {check.name: check.findings for check in certificate.checks if check.status == "failed"}


@pytest.mark.parametrize(("task", "fault", "check"), FAULTS)
def test_a_planted_fault_is_found_by_the_check_that_is_named_after_it(task: Any, fault: str, check: str) -> None:
    assert [*failed(certified(partial(task, fault), check))] == [check]


@pytest.mark.parametrize("task", [Sum, BatchedSum, Count])
def test_its_clean_twin_passes_all_checks(task: Any) -> None:
    assert failed(certified(task)) == {}


def test_programs_behind_walls_pass_all_checks_of_isolation() -> None:
    certificate = run(certify("planted", Programs, {}, PanelSettings(samples=1, only=OF_PROGRAMS)))
    assert {check.name: check.status for check in certificate.checks} == dict.fromkeys(OF_PROGRAMS, "passed")


def harbor_task(folder: Path, further: Mapping[str, str]) -> Any:
    """A task in Harbor's format that wants 7 in a file."""
    files = {
        "task.toml": f'[verifier.env]\nJUDGE_KEY = "{SECRET}"\n',
        "instruction.md": "Write 3 + 4 to /app/answer.",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/bash\n{CHECK}",
        "solution/solve.sh": "echo 7 > /app/answer\n",
        **further,
    }
    for name, content in files.items():
        path = folder / "planted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return certified_environment(HARBOR_TASKS, {"settings": {"tasks": str(folder)}})


@pytest.mark.parametrize("fault", HARBOR_FAULTS)
def test_a_fault_of_a_harbor_task_is_found_by_its_check_and_its_twin_passes_that(tmp_path: Path, fault: str) -> None:
    check, files = HARBOR_FAULTS[fault]
    assert [*failed(certified(harbor_task(tmp_path / "faulty", files), check))] == [check]
    assert failed(certified(harbor_task(tmp_path / "clean", {}), check)) == {}
