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


async def ended_after(agents: EnvironmentHost) -> tuple[float, object]:
    """When an agent ended that never ends by itself, and how."""
    run = StepRequest(message_log=[], extra_env_info=CALL.model_dump(), step_id="run")
    async with aclosing(agents.step([run], CALLER)) as items:
        async for item in items:
            for _, result in item:
                return virtual_time.now(), result
    raise AssertionError("The run has no result.")


def test_a_run_ends_when_its_caller_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[float, object]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(liveness, "has_died", lambda caller: caller == CALLER and loop.time() >= 100)
        settings = AgentSettings(import_path=f"{FUNCTIONS}:endless")
        return await ended_after(EnvironmentHost("task_agent", RUNS_OF_TASK, {"settings": settings}, None))

    at_s, failure = virtual_time.run(run())
    assert failure is _CALLER_GONE
    assert 100 <= at_s <= 100 + liveness.POLL_S
