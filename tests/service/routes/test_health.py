"""`/healthz` tells that the process is alive, `/readyz` that rollouts can be served."""

from unittest.mock import AsyncMock

from deployments.failures import EnvironmentLost, GenerationLost
from tests.service.scripted_http import ScriptedHttp


def test_a_service_without_one_of_its_tasks_is_ready_and_degraded() -> None:
    service = ScriptedHttp()
    service.environments["math"].describe = AsyncMock(side_effect=EnvironmentLost("It died."))  # type: ignore[method-assign]
    degraded = {"part": "environment", "task_name": "math", "replica_id": None, "reason": "It died."}
    for path in ("/readyz", "/health", "/health_generate"):
        response = service.request("GET", path)
        assert (response.status_code, response.json()) == (200, {"status": "ready", "degraded": [degraded]})


def test_a_service_is_not_ready_and_yet_alive_when_the_generator_is_lost() -> None:
    service = ScriptedHttp()
    service.generator.describe = AsyncMock(side_effect=GenerationLost("It died."))  # type: ignore[method-assign]
    for path in ("/readyz", "/health", "/health_generate"):
        response = service.request("GET", path)
        assert (response.status_code, response.headers["content-type"]) == (503, "application/problem+json")
        assert response.headers["retry-after"] == "2"
        assert response.json()["errors"] == [{"field": "", "message": "It died", "value": None}]
    response = service.request("GET", "/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "alive"})
