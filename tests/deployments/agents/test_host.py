"""The replicas that run agents: whose runs end with the ingress replica that wants them."""

import asyncio
from contextlib import aclosing

import pytest

from deployments.agents.environment import RUNS_OF_TASK
from deployments.agents.settings import AgentSettings
from deployments.environments.host import _CALLER_GONE, EnvironmentHost
from deployments.protocols.environments import StepRequest
from deployments.rpc import liveness
from tests import virtual_time
from tests.deployments.agents.test_programs import CALL, FUNCTIONS

CALLER = "SERVE_REPLICA::rollout#Ingress#one"


async def test_a_run_ends_when_its_caller_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(liveness, "has_died", lambda caller: caller == CALLER and loop.time() >= 100)
    settings = AgentSettings(import_path=f"{FUNCTIONS}:endless")
    agents = EnvironmentHost("task_agent", RUNS_OF_TASK, {"settings": settings}, None)
    run = StepRequest(message_log=[], extra_env_info=CALL.model_dump(), step_id="run")
    async with aclosing(agents.step([run], CALLER)) as items:
        [(_, failure)] = [result async for item in items for result in item]
    assert failure is _CALLER_GONE
    assert 100 <= virtual_time.now() <= 100 + liveness.POLL_S
