"""A replica learns of its shutdown when it begins, and reads the config of its own deployment."""

import asyncio
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayError, RpcError
from ray.serve._private.replica import Replica
from ray.serve.config import AutoscalingConfig
from ray.serve.context import ReplicaContext

from deployments.upstream.ray_serve import own_replica
from deployments.upstream.ray_serve.own_replica import (
    FIELD,
    _graceful_shutdown_s,
    _seconds_until_node_leaves,
    call_at_shutdown,
    most_replicas,
)
from deployments.upstream.ray_serve.serve_internals import RAYLET


@pytest.mark.parametrize(("leaves_in_s", "bound_s"), [(math.inf, 10.0), (60.0, 10.0), (8.0, 4.0), (0.0, 0.0)])
async def test_the_shutdown_of_a_replica_says_how_long_its_calls_may_go_on(
    monkeypatch: pytest.MonkeyPatch, leaves_in_s: float, bound_s: float
) -> None:
    order: list[Any] = []

    async def perform(replica: Any) -> None:
        await asyncio.sleep(0)
        order.append(replica)

    monkeypatch.setattr(Replica, "perform_graceful_shutdown", perform)
    monkeypatch.setattr(own_replica, "_seconds_until_node_leaves", lambda: leaves_in_s)
    replica: Any = SimpleNamespace(_deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=20.0))

    call_at_shutdown(order.append)
    for _ in range(2):
        # A controller that has restarted does not know that it has begun.
        await Replica.perform_graceful_shutdown(replica)  # type: ignore[no-untyped-call]
    assert order == [bound_s, replica, replica]


def answer_as_node(monkeypatch: pytest.MonkeyPatch, deadlines_ms: Callable[[float], dict[str, int]]) -> None:
    """This process is on the node "here", and it is 1,000 s after 1970."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(own_replica, "deadlines_of_leaving_nodes", deadlines_ms)


@pytest.mark.parametrize(
    ("deadlines_ms", "left_s"),
    [
        ({}, math.inf),
        ({"elsewhere": 1_030_000}, math.inf),
        ({"here": 1_030_000, "elsewhere": 1_001_000}, 30.0),
        ({"here": 999_000}, 0.0),
        # Given notice without a deadline.
        ({"here": 0}, math.inf),
    ],
)
def test_a_node_leaves_at_the_deadline_that_ray_was_told_for_it(
    monkeypatch: pytest.MonkeyPatch, deadlines_ms: dict[str, int], left_s: float
) -> None:
    answer_as_node(monkeypatch, lambda _: deadlines_ms)
    assert _seconds_until_node_leaves() == left_s


def test_a_shutdown_goes_on_without_the_deadline_where_ray_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def time_out(_timeout_s: float) -> dict[str, int]:
        raise RayError("Deadline Exceeded")

    answer_as_node(monkeypatch, time_out)
    assert _seconds_until_node_leaves() == math.inf
    assert "its replica may end before its calls" in caplog.text


def test_this_ray_tells_of_nodes_that_leave() -> None:
    assert "get_draining_nodes" in dir(RAYLET.InnerGcsClient)
    assert issubclass(RpcError, RayError)


AUTOSCALING = AutoscalingConfig(min_replicas=1, initial_replicas=1, max_replicas=8)


@pytest.mark.parametrize(("autoscaling", "most"), [(None, 3), (AUTOSCALING, 8)])
def test_a_deployment_has_the_most_replicas_that_its_config_allows(
    monkeypatch: pytest.MonkeyPatch, autoscaling: AutoscalingConfig | None, most: int
) -> None:
    context = SimpleNamespace(world_size=3, **{FIELD: SimpleNamespace(autoscaling_config=autoscaling)})
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    assert most_replicas() == most


def test_the_time_for_a_shutdown_is_that_of_the_deployment() -> None:
    assert _graceful_shutdown_s(SimpleNamespace(**{FIELD: SimpleNamespace(graceful_shutdown_timeout_s=20)})) == 20.0


def test_this_ray_keeps_the_config_where_it_is_read() -> None:
    assert FIELD in {field.name for field in fields(ReplicaContext)}
    assert f"self.{FIELD} = " in inspect.getsource(Replica.__init__)
