"""How many ingress replicas share a quota."""

from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.config import AutoscalingConfig

from service.ingress import ingress_replicas

AUTOSCALING = AutoscalingConfig(min_replicas=1, initial_replicas=1, max_replicas=8)


@pytest.mark.parametrize(("autoscaling", "shared_by"), [(None, 3), (AUTOSCALING, 8)])
def test_quotas_are_shared_by_the_most_replicas_that_the_config_allows(
    monkeypatch: pytest.MonkeyPatch, autoscaling: AutoscalingConfig | None, shared_by: int
) -> None:
    deployment = SimpleNamespace(autoscaling_config=autoscaling)
    context = SimpleNamespace(world_size=3, _deployment_config=deployment)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    assert ingress_replicas() == shared_by
