"""A Ray that does not start ends the start with a sentence; a shutdown waits for rollouts, but not for ever."""

import os
from unittest.mock import patch

import pytest
import ray
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema

from service.startup import local_service
from service.startup.config import ServiceNotStarted
from service.startup.local_service import _drain_replicas, _shutdown_bound_s, _start_ray
from tests.patterns import whole


class HandleThatLearnsItsReplicas:
    """As Ray Serve's: `broadcast` finds no replica before the controller's second message."""

    def __init__(self, calls_before: int, left_by_replica: list[int]) -> None:
        self._calls_before = calls_before
        self._left_by_replica = left_by_replica
        self.bounds_s: list[float] = []

    def broadcast(self, method: str, bound_s: float) -> "HandleThatLearnsItsReplicas":
        assert method == "drain"
        self.bounds_s.append(bound_s)
        return self

    def results(self, timeout_s: float) -> list[int]:
        if len(self.bounds_s) <= self._calls_before:
            raise DeploymentUnavailableError(DeploymentID("Ingress", "rollout"))
        assert timeout_s > self.bounds_s[-1]
        return self._left_by_replica


def application(**options: float) -> ServeApplicationSchema:
    ingress = DeploymentSchema(name="Ingress", **options)  # type: ignore[arg-type]
    others = DeploymentSchema(name="Generator", graceful_shutdown_timeout_s=600)
    return ServeApplicationSchema(import_path="service.app:build", deployments=[others, ingress])


def test_the_rollouts_have_as_long_as_the_ingress_has_to_shut_down() -> None:
    assert _shutdown_bound_s(application(graceful_shutdown_timeout_s=3600)) == 3600


def test_a_handle_that_does_not_know_its_replicas_yet_is_asked_again() -> None:
    handle = HandleThatLearnsItsReplicas(calls_before=2, left_by_replica=[3, 4])
    assert _drain_replicas(handle, 20) == 7
    assert handle.bounds_s == [20, 20, 20]


def test_an_ingress_without_replicas_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_drain_replicas.retry, "stop", local_service.stop_after_delay(0.1))  # type: ignore[attr-defined]
    with pytest.raises(DeploymentUnavailableError):
        _drain_replicas(HandleThatLearnsItsReplicas(calls_before=10_000, left_by_replica=[]), 20)


LATE = Exception("The current node timed out during startup.")


def started_ray(*outcomes: object) -> int:
    """How often the processes of a try were ended, with these outcomes of `ray.init`, one a try."""
    with (
        patch.dict(os.environ),
        patch.object(local_service, "require_cluster_token"),
        patch.object(local_service, "end_descendants") as ended,
        patch.object(ray, "init", side_effect=outcomes),
    ):
        _start_ray(8000)
    return ended.call_count


def test_a_ray_that_is_late_is_started_again() -> None:
    assert started_ray(LATE, LATE, None) == 2


@pytest.mark.parametrize("error", [LATE, OSError("no memory")])
def test_whatever_ray_raises_is_said(error: Exception) -> None:
    with pytest.raises(ServiceNotStarted, match=whole(f"Ray did not start: {error}")):
        started_ray(error, error, error)
