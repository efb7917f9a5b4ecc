"""`/healthz` tells that the process is alive, `/readyz` that rollouts can be served."""

import asyncio
from typing import Any

import pytest

from deployments.failures import EnvironmentLost, GenerationLost
from tests.service.scripted_http import ScriptedHttp


def test_a_service_without_one_of_its_tasks_is_ready_and_degraded() -> None:
    service = ScriptedHttp()

    async def lost() -> Any:
        raise EnvironmentLost("It died.")

    service.environments["math"].describe = lost  # type: ignore[method-assign]
    degraded = {"part": "environment", "task_name": "math", "replica_id": None, "reason": "It died."}
    for path in ("/readyz", "/health", "/health_generate"):
        response = service.request("GET", path)
        assert (response.status_code, response.json()) == (200, {"status": "ready", "degraded": [degraded]})


def test_a_service_is_not_ready_and_yet_alive_when_the_generator_is_lost() -> None:
    service = ScriptedHttp()

    async def lost() -> Any:
        raise GenerationLost("It died.")

    service.generator.describe = lost  # type: ignore[method-assign]
    for path in ("/readyz", "/health", "/health_generate"):
        response = service.request("GET", path)
        assert (response.status_code, response.headers["content-type"]) == (503, "application/problem+json")
        assert response.headers["retry-after"] == "2"
        assert response.json()["errors"] == [{"field": "", "message": "It died", "value": None}]
    response = service.request("GET", "/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "alive"})


def test_a_service_is_not_ready_when_the_generator_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedHttp()

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("service.rollout_requests.service_status.ANSWER_WITHIN_S", 0.001)
    service.generator.describe = never  # type: ignore[method-assign]
    response = service.request("GET", "/readyz")
    assert response.status_code == 503
    assert "The answer of the generator took longer" in response.json()["detail"]
