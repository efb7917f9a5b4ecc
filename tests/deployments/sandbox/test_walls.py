"""A wall stands only if something enforces it and the try to get over it failed."""

import json
import os
import uuid
from collections.abc import Set
from contextlib import ExitStack

import pytest

from deployments.sandbox import launch
from deployments.sandbox.interface import WALLS, Limits, Outcome, Program, SandboxLost, WallName
from deployments.sandbox.launch import FIRST_UID, LAST_UID, leased_uid
from deployments.sandbox.self_test import missing_walls

TRIED_BY_ONE = [name for name in WALLS if name not in ("total_memory", "ends_whole")]


def fake_run(*broken: str, ended_by: str = "memory", exit_code: int = 0) -> Outcome:
    """The outcome of the probe, where the walls `broken` do not hold."""
    found = json.dumps({name: name not in broken for name in TRIED_BY_ONE})
    code = exit_code if ended_by == "exit" else None
    return Outcome(ended_by, code, found, "", 0.1)  # type: ignore[arg-type]


def missing(*outcomes: Outcome, without: Set[WallName] = frozenset()) -> tuple[WallName, ...]:
    remaining = iter(outcomes)

    def run(_program: Program, _limits: Limits) -> Outcome:
        return next(remaining)

    return missing_walls(without, run)


def test_all_walls_stand_if_every_try_failed() -> None:
    assert missing(fake_run()) == ()


def test_a_wall_that_was_got_over_does_not_stand() -> None:
    assert missing(fake_run("files", ended_by="exit")) == ("files", "total_memory")


@pytest.mark.parametrize("ended_by", ["time", "processor_time", "exit"])
def test_a_try_that_did_not_come_to_use_all_memory_is_made_again(ended_by: str) -> None:
    told_nothing = fake_run(ended_by=ended_by, exit_code=1)
    assert missing(told_nothing, told_nothing, fake_run()) == ()
    assert missing(told_nothing, told_nothing, told_nothing) == ("total_memory",)


def test_a_wall_that_nothing_enforces_does_not_stand_even_if_the_try_failed() -> None:
    assert missing(fake_run(), without={"disk"}) == ("disk",)


def test_a_sandbox_in_which_no_program_runs_is_lost() -> None:
    with pytest.raises(SandboxLost, match=r"it ended by exit with exit code 126 and wrote 'no interpreter'\."):
        missing(Outcome("exit", 126, "", "no interpreter", 0.1))


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
