"""What a replica reads of the config of its own deployment, and that this Ray still has it."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve._private.replica import Replica
from ray.serve.config import AutoscalingConfig
from ray.serve.context import ReplicaContext

from deployments.upstream.ray_serve.own_replica import FIELD, graceful_shutdown_s, most_replicas

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
