"""The replicas that run agents: whose runs end with the ingress replica that wants them."""

import asyncio
from contextlib import aclosing

from deployments.agents import host
from deployments.agents.caller_leases import CallerLeases
from deployments.agents.host import CALLER_GONE, AgentHost
from deployments.agents.settings import AgentSettings
from deployments.protocols import StepRequest
from tests import virtual_time
from tests.deployments.agents.test_programs import CALL, FUNCTIONS


def test_runs_are_lost_once_when_their_caller_is_silent_for_longer_than_its_lease() -> None:
    leases = CallerLeases(lease_s=10)
    leases.begin("a", ["one", "two"], now=0)
    leases.begin("b", ["three"], now=0)
    leases.heard("b", now=5)
    leases.end("a", ["two"])
    assert leases.lost(now=10) == []
    assert leases.lost(now=11) == ["one"]
    assert leases.lost(now=15) == []
    assert leases.lost(now=16) == ["three"]
    assert len(leases) == 0


def test_a_caller_without_runs_has_no_lease() -> None:
    leases = CallerLeases(lease_s=10)
    leases.heard("a", now=0)
    leases.begin("a", ["one"], now=0)
    leases.end("a", ["one"])
    leases.end("a", ["one"])
    assert (len(leases), leases.lost(now=100)) == (0, [])


def run_of(step_id: str) -> StepRequest:
    return StepRequest(message_log=[], extra_env_info=CALL.model_dump(), step_id=step_id)


async def ended_after(agents: AgentHost, heard_for_s: float) -> tuple[float, object]:
    """Runs an agent that never ends by itself, for a caller that lives for so long. When it ended, and how."""

    async def live() -> None:
        for _ in range(int(heard_for_s)):
            await asyncio.sleep(1)
            await agents.heard("ingress")

    living = asyncio.create_task(live())
    async with aclosing(agents.step([run_of("run")], "ingress")) as items:
        async for item in items:
            for _, result in item.results:
                await living
                return virtual_time.now(), result
    raise AssertionError("The run has no result.")


def test_a_run_lives_as_long_as_its_caller_and_its_lease() -> None:
    async def run() -> tuple[float, object]:
        agents = AgentHost("task_agent", AgentSettings(import_path=f"{FUNCTIONS}:endless", timeout_s=3600))
        return await ended_after(agents, heard_for_s=100)

    at_s, failure = virtual_time.run(run())
    assert failure is CALLER_GONE
    assert 100 + host.LEASE_S < at_s <= 100 + host.LEASE_S + 2 * host.TICK_S
