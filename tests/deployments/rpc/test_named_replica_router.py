"""Which replicas a call may go to, and what the caller is told of them."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from deployments.rpc.handle_calls import live_replicas_of, record_live_replicas
from deployments.rpc.named_replica_router import NamedReplicaRouter


@dataclass(frozen=True)
class ScriptedReplicaID:
    unique_id: str


REPLICAS: list[Any] = [SimpleNamespace(replica_id=ScriptedReplicaID(name)) for name in ("a", "b", "c")]
A, B, C = REPLICAS


class Router(NamedReplicaRouter):
    """Without the threads and clients that its base class starts."""

    def __init__(self, deployment_id: Any = None) -> None:
        self._deployment_id = deployment_id


def choices(session_id: str) -> tuple[list[list[Any]], bool]:
    """The groups of replicas in their order, and whether the router may pause between attempts."""
    pending: Any = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session_id), routing_context=SimpleNamespace(should_backoff=False)
    )
    return asyncio.run(Router().choose_replicas(REPLICAS, pending)), pending.routing_context.should_backoff


@pytest.mark.parametrize(
    ("session_id", "groups"), [("b", [[B], REPLICAS]), *((unknown, [REPLICAS]) for unknown in ("", "gone"))]
)
def test_a_call_prefers_the_replica_that_it_names_and_may_go_to_any(session_id: str, groups: list[list[Any]]) -> None:
    assert choices(session_id) == (groups, True)


def test_without_a_call_all_replicas_are_chosen() -> None:
    assert asyncio.run(Router().choose_replicas(REPLICAS)) == [REPLICAS]


def test_the_router_records_the_replicas_whenever_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[Any] = []
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda _self, replicas: updated.append(replicas))
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", lambda _self, replica_id: updated.append(replica_id))
    handle: Any = SimpleNamespace(deployment_id=object())
    routing = Router(handle.deployment_id)
    assert live_replicas_of(handle) == ()
    monkeypatch.setattr(NamedReplicaRouter, "curr_replicas", {replica.replica_id: replica for replica in (C, A)})
    routing.update_replicas([C, A])
    assert live_replicas_of(handle) == ("a", "c")
    monkeypatch.setattr(NamedReplicaRouter, "curr_replicas", {A.replica_id: A})
    routing.on_replica_actor_died(C.replica_id)
    assert live_replicas_of(handle) == ("a",)
    assert updated == [[C, A], C.replica_id]


def test_deployments_are_recorded_apart() -> None:
    first, second = (SimpleNamespace(deployment_id=object()) for _ in range(2))
    record_live_replicas(first.deployment_id, ["b", "a"])
    unchecked: Any = (first, second)
    assert [live_replicas_of(handle) for handle in unchecked] == [("a", "b"), ()]
