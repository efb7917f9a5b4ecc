"""The report says of a wall that it stands only if something enforces it and the try to get over it failed."""

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from deployments.sandbox import launch
from deployments.sandbox.interface import (
    WALLS,
    Limits,
    Outcome,
    Program,
    SandboxLost,
    SandboxTooWeak,
    Wall,
    WallName,
    WallReport,
)
from deployments.sandbox.launch import FIRST_UID, LAST_UID, leased_uid
from deployments.sandbox.self_test import check_walls

BY = dict.fromkeys(WALLS, "a moat")
TRIED_BY_ONE = [name for name in WALLS if name not in ("total_memory", "ends_whole")]


def fake_run(*broken: str, ended_by: str = "memory", stderr: str = "", exit_code: int = 0) -> Outcome:
    """The outcome of the probe, where the walls `broken` do not hold."""
    found = json.dumps({name: name not in broken for name in TRIED_BY_ONE})
    code = exit_code if ended_by == "exit" else None
    return Outcome(ended_by, code, found, stderr, 0.1)  # type: ignore[arg-type]


def report_of(*outcomes: Outcome, by: Mapping[WallName, str] = BY) -> WallReport:
    remaining = iter(outcomes)

    def run(_program: Program, _limits: Limits) -> Outcome:
        return next(remaining)

    return check_walls("castle", by, run)


def test_all_walls_stand_if_every_try_failed() -> None:
    report = report_of(fake_run())
    assert report.missing() == []
    assert [wall.name for wall in report.walls] == list(WALLS)
    assert report["network"] == Wall("network", True, "a moat")


def test_a_wall_that_was_got_over_does_not_stand() -> None:
    report = report_of(fake_run("files", ended_by="exit"))
    assert report.missing() == [
        Wall("files", False, "a moat did not hold it"),
        Wall("total_memory", False, "a moat did not hold it: the try ended by exit after 0.1 s with exit code 0"),
    ]


@pytest.mark.parametrize("ended_by", ["time", "processor_time", "exit"])
def test_a_try_that_did_not_come_to_use_all_memory_is_made_again(ended_by: str) -> None:
    told_nothing = fake_run(ended_by=ended_by, exit_code=1, stderr="no process left\n")
    assert report_of(told_nothing, told_nothing, fake_run()).missing() == []
    (wall,) = report_of(told_nothing, told_nothing, told_nothing).missing()
    why = " with exit code 1 no process left" if ended_by == "exit" else ""
    assert wall.by == f"a moat did not hold it: the try ended by {ended_by} after 0.1 s{why}"


def test_a_wall_that_nothing_enforces_does_not_stand_even_if_the_try_failed() -> None:
    by: dict[WallName, str] = {name: means for name, means in BY.items() if name != "disk"}
    assert report_of(fake_run(), by=by).missing() == [
        Wall("disk", False, "nothing enforces it here, although this one try was refused")
    ]


def test_a_sandbox_in_which_no_program_runs_is_lost() -> None:
    with pytest.raises(SandboxLost, match=r"it ended by exit with exit code 126 and wrote 'no interpreter'\."):
        report_of(Outcome("exit", 126, "", "no interpreter", 0.1))


def test_the_report_is_a_line_a_wall() -> None:
    lines = str(report_of(fake_run("files"))).splitlines()
    assert lines[:3] == [
        "isolation: castle",
        "network: stands (a moat)",
        "files: DOES NOT STAND (a moat did not hold it)",
    ]
    assert len(lines) == 1 + len(WALLS)


def test_the_refusal_names_the_walls_and_what_to_do() -> None:
    report = report_of(fake_run("files"))
    assert str(SandboxTooWeak(report, report.missing())) == (
        "The sandbox is not started: required walls do not stand on this machine: files (a moat did not hold it). Its "
        "isolation is castle. Install bubblewrap and permit namespaces to the service, or do not require these walls."
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="This process may give no user ids.")
def test_no_user_id_is_leased_twice_and_each_can_be_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of the machine's own would leave other services, and other runs of these tests, without one.
    monkeypatch.setattr(launch, "_UID_LEASES", f"rollout-test-{uuid.uuid4()}-")
    all_ids = set(range(FIRST_UID, LAST_UID + 1))
    for _ in range(2):
        with ExitStack() as closing:
            leased = {closing.enter_context(leased_uid()) for _ in range(300)}
            assert len(leased & all_ids) == 300
            with pytest.raises(SandboxLost, match="All 478 user ids for sandboxes are taken"):
                [closing.enter_context(leased_uid()) for _ in range(300)]


@pytest.mark.skipif(os.geteuid() != 0, reason="This process may give no user ids.")
def test_services_that_do_not_see_each_other_seldom_take_the_same_user_id() -> None:
    first_choices = set()
    for _ in range(20):
        with leased_uid() as uid:
            first_choices.add(uid)
    assert len(first_choices) > 5
