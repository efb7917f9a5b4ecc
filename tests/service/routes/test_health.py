"""`/healthz` tells that the process is alive, `/readyz` that rollouts can be served."""

import asyncio
from typing import Any

import pytest

from deployments.failures import EnvironmentLost, GenerationLost
from tests.service.scripted_http import ScriptedHttp


def test_a_service_whose_deployments_answer_is_ready() -> None:
    response = ScriptedHttp().request("GET", "/readyz")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize("part", ["generator", "math", "sliding_puzzle"])
def test_a_service_is_not_ready_when_a_deployment_is_lost(part: str) -> None:
    service = ScriptedHttp()

    async def lost() -> Any:
        raise GenerationLost("It died.") if part == "generator" else EnvironmentLost("It died.")

    (service.generator if part == "generator" else service.environments[part]).describe = lost  # type: ignore[method-assign]
    response = service.request("GET", "/readyz")
    assert (response.status_code, response.headers["content-type"]) == (503, "application/problem+json")
    assert response.headers["retry-after"] == "2"
    assert response.json()["errors"] == [{"field": "", "message": "It died", "value": None}]


def test_a_service_is_not_ready_when_a_deployment_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedHttp()

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("service.rollout_service.READY_WITHIN_S", 0.001)
    service.environments["math"].describe = never  # type: ignore[method-assign]
    response = service.request("GET", "/readyz")
    assert response.status_code == 503
    assert "environment 'math'" in response.json()["detail"]


def test_a_service_is_alive_also_when_it_is_not_ready() -> None:
    service = ScriptedHttp()

    async def lost() -> Any:
        raise GenerationLost("It died.")

    service.generator.describe = lost  # type: ignore[method-assign]
    response = service.request("GET", "/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "alive"})
