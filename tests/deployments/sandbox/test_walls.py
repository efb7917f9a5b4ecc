"""The walls that an isolation has by the means of the kernel, and the user ids of runs."""

import os
import uuid
from contextlib import ExitStack
from unittest.mock import AsyncMock

import pytest

from deployments.sandbox import launch, limits
from deployments.sandbox.bubblewrap import _FILTER, Bubblewrap
from deployments.sandbox.interface import Outcome, SandboxLost
from deployments.sandbox.launch import FIRST_UID, LAST_UID, Interpreter, leased_uid
from deployments.sandbox.limits import LimitJail
from deployments.sandbox.local import LocalSandbox

INTERPRETER = Interpreter("/usr/bin/python3", "/usr", ())


def test_bubblewrap_has_every_wall_where_its_filter_is_known() -> None:
    assert _FILTER is not None
    assert Bubblewrap(INTERPRETER).without == set()


@pytest.mark.parametrize(
    ("landlock", "known_machine", "without"),
    [
        (6, True, {"total_memory", "disk"}),
        (1, True, {"total_memory", "disk"}),
        (0, True, {"total_memory", "disk", "files", "service_processes"}),
        (6, False, {"total_memory", "disk", "network", "system_calls"}),
    ],
)
def test_without_namespaces_the_walls_stand_that_the_kernel_has_means_for(
    landlock: int, known_machine: bool, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_landlock_version", lambda: landlock)
    if not known_machine:
        monkeypatch.setattr(limits, "system_call_filter", lambda **_: None)
    assert LimitJail(INTERPRETER).without == without


def test_a_machine_on_which_no_program_runs_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Outcome("exit", 126, "", "no interpreter", 0.1)
    monkeypatch.setattr(LocalSandbox, "_run", AsyncMock(return_value=ended))
    says = r"^No program can be run .* limits: a program ended by exit with exit code 126 and wrote 'no interpreter'\.$"
    with pytest.raises(SandboxLost, match=says):
        LocalSandbox(isolation="limits")


@pytest.mark.skipif(os.geteuid() != 0, reason="This process may give no user ids.")
def test_no_user_id_is_leased_twice_and_each_can_be_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of the machine's own would leave other services, and other runs of these tests, without one.
    monkeypatch.setattr(launch, "_UID_LEASES", f"rollout-test-{uuid.uuid4()}-")
    all_ids = set(range(FIRST_UID, LAST_UID + 1))
    for _ in range(2):
        with ExitStack() as closing:
            assert len({closing.enter_context(leased_uid()) for _ in range(300)} & all_ids) == 300
            with pytest.raises(SandboxLost, match="All 478 user ids for sandboxes are taken"):
                [closing.enter_context(leased_uid()) for _ in range(300)]
