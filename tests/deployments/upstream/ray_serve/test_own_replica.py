"""That a replica learns of its shutdown at its begin."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.replica import Replica

from deployments.upstream.ray_serve.own_replica import call_at_shutdown
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
