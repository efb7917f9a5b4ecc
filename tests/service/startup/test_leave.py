"""A node is given notice if its replicas can go elsewhere, and the command returns when they have ended."""

from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from rich.console import Console

from service.startup import leave
from service.startup.commands import ServiceNotStarted
from service.startup.leave import HEAD, node_to_leave, replicas_on

NODES: list[dict[str, Any]] = [
    {"NodeID": "head", "Alive": True, "Resources": {HEAD: 1.0, "CPU": 4.0}},
    {"NodeID": "spot", "Alive": True, "Resources": {"CPU": 4.0}},
    {"NodeID": "gone", "Alive": False, "Resources": {}},
]


CLOCKS = {"head": 9000.0, "spot": 1000.0}
"""What the clock of each node shows."""


class ScriptedCluster:
    """Each time it is asked, one replica less is on the node `spot`, until `stays` are left."""

    def __init__(self, stays: int = 0) -> None:
        self._stays = stays
        self._left = 3

    def applications(self) -> dict[str, Any]:
        self._left = max(self._left - 1, self._stays)
        leaving = [{"actor_name": f"Generator-{number}", "node_id": "spot"} for number in range(self._left)]
        staying = [{"actor_name": "math-0", "node_id": "head"}, {"actor_name": "starting"}]
        return {"rollout": {"deployments": {"Generator": {"replicas": leaving}, "math": {"replicas": staying}}}}

    def kill(self, actor_name: str) -> None:
        raise AssertionError(f"{actor_name} must end by itself")


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Those that Ray was given; it takes all but the one of 13 seconds, and does not answer to that of 14."""
    given: list[tuple[str, float]] = []

    def take(node_id: str, deadline_s: float, timeout_s: float) -> str | None:
        assert timeout_s == leave.ANSWER_WITHIN_S
        within_s = round(deadline_s - CLOCKS[node_id], 2)
        given.append((node_id, within_s))
        if within_s == 14:
            raise RayError("Deadline Exceeded")
        return "it is not willing" if within_s == 13 else None

    class OnSpot:
        def get_node_id(self) -> str:
            return "spot"

    monkeypatch.setattr(leave, "give_notice", take)
    monkeypatch.setattr(leave, "time_of_node", lambda node_id, _timeout_s: CLOCKS[node_id])
    monkeypatch.setattr(leave, "POLL_S", 0.001)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(ray, "get_runtime_context", OnSpot)
    return given


@pytest.mark.parametrize("node_id", [None, "spot"])
def test_the_node_is_given_notice_and_waited_for_until_it_has_no_replica(
    notices: list[tuple[str, float]], node_id: str | None
) -> None:
    console = Console(record=True, quiet=False, file=None, width=120)
    leave.leave(node_id, 25.0, ScriptedCluster(), console)
    assert notices == [("spot", 25.0)]
    assert console.export_text().strip() == "Node spot has no replica any more."


def test_replicas_that_are_left_when_the_time_is_over_are_named(notices: list[tuple[str, float]]) -> None:
    message = r"After 0\.05 s there are still on node spot: Generator-0, Generator-1\."
    with pytest.raises(ServiceNotStarted, match=message):
        leave.leave(None, 0.05, ScriptedCluster(stays=2), Console(quiet=True))
    assert notices == [("spot", 0.05)]


@pytest.mark.parametrize(
    ("within_s", "message"),
    [
        (13, "Ray refuses the notice: it is not willing"),
        (14, "Ray's control service did not take the notice: Deadline Exceeded"),
    ],
)
def test_a_notice_that_ray_does_not_take_is_an_error(
    notices: list[tuple[str, float]], within_s: float, message: str
) -> None:
    with pytest.raises(ServiceNotStarted, match=message):
        leave.leave(None, within_s, ScriptedCluster(), Console(quiet=True))
    assert notices == [("spot", within_s)]


@pytest.mark.parametrize(
    ("node_id", "nodes", "message"),
    [
        ("head", NODES, "Node head is the head, without which the cluster does not go on."),
        ("gone", NODES, "Node gone is not in the cluster; there are head, spot."),
        ("head", NODES[:1], "The cluster has no other node: end the service itself, with SIGTERM."),
    ],
)
def test_a_node_whose_replicas_cannot_go_elsewhere_is_given_no_notice(
    node_id: str, nodes: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ServiceNotStarted) as refused:
        node_to_leave(node_id, nodes)
    assert str(refused.value) == message


def test_the_replicas_of_a_node_are_those_of_all_deployments_there() -> None:
    applications = ScriptedCluster().applications()
    assert replicas_on("spot", applications) == ["Generator-0", "Generator-1"]
    assert replicas_on("head", applications) == ["math-0"]
