"""A replica learns of its shutdown when it begins, and reads the config of its own deployment."""

import asyncio
import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve._private.replica import Replica
from ray.serve.config import AutoscalingConfig
from ray.serve.context import ReplicaContext

from deployments.upstream.ray_serve.own_replica import FIELD, call_at_shutdown, graceful_shutdown_s, most_replicas
from tests import virtual_time


def test_the_shutdown_of_a_replica_calls_back_first_and_says_how_long_its_calls_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[Any] = []

    async def perform(replica: Any) -> None:
        await asyncio.sleep(0)
        order.append(replica)

    monkeypatch.setattr(Replica, "perform_graceful_shutdown", perform)
    replica: Any = SimpleNamespace(_deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=20.0))

    async def run() -> None:
        call_at_shutdown(order.append)
        await Replica.perform_graceful_shutdown(replica)  # type: ignore[no-untyped-call]
        # A controller that has restarted does not know that it has begun.
        await Replica.perform_graceful_shutdown(replica)  # type: ignore[no-untyped-call]

    virtual_time.run(run())
    assert order == [10.0, replica, replica]


AUTOSCALING = AutoscalingConfig(min_replicas=1, initial_replicas=1, max_replicas=8)


@pytest.mark.parametrize(("autoscaling", "most"), [(None, 3), (AUTOSCALING, 8)])
def test_a_deployment_has_the_most_replicas_that_its_config_allows(
    monkeypatch: pytest.MonkeyPatch, autoscaling: AutoscalingConfig | None, most: int
) -> None:
    context = SimpleNamespace(world_size=3, **{FIELD: SimpleNamespace(autoscaling_config=autoscaling)})
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    assert most_replicas() == most


def test_the_time_for_a_shutdown_is_that_of_the_deployment() -> None:
    assert graceful_shutdown_s(SimpleNamespace(**{FIELD: SimpleNamespace(graceful_shutdown_timeout_s=20)})) == 20.0


def test_this_ray_keeps_the_config_where_it_is_read() -> None:
    assert FIELD in {field.name for field in fields(ReplicaContext)}
    assert f"self.{FIELD} = " in inspect.getsource(Replica.__init__)
