"""Traffic of several kinds between one ingress replica and one replica: none is lost while the replica answers the
other, and all are lost when it hangs. Both halves of the heartbeats are real. In virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.host import EnvironmentHost
from deployments.failures import EnvironmentLost, GenerationLost
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from deployments.protocols.model_server import ServedPart, ServedRequest, ServedTokens
from rollout_env import ChatMessage, StepOutcome
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from tests import virtual_time
from tests.fakes.environment import StepsAlone
from tests.fakes.in_process_handle import InProcessHandle, ReadyReplica, TimedEngine
from tests.service.scripted import outcome

PART_EVERY_S = 0.05
DONE = Generation([1], [0.0], "stop")
ENDED = "ended"


class SleepingEngine(TimedEngine):
    """A generation takes as many seconds as it may have tokens."""

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(request.max_new_tokens)
        return DONE


class SleepingReplica(ReadyReplica):
    """A call of a model server's API takes as many seconds as it may have tokens: it streams parts all the time, or
    one at its begin if it is named "quiet"."""

    def __init__(self) -> None:
        super().__init__(SleepingEngine())

    async def answer_call(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        yield ServedPart(b"begin", 200, "text/event-stream")
        is_quiet = request.generation_id.startswith("quiet")
        for _ in range(1 if is_quiet else round(request.max_new_tokens / PART_EVERY_S)):
            await asyncio.sleep(request.max_new_tokens if is_quiet else PART_EVERY_S)
            yield ServedPart(b"token")
        yield ServedPart(b"end", tokens=ServedTokens(1, 1))


class Seconds(BaseModel):
    seconds: float


class SleepingEnvironment(StepsAlone):
    """A step takes as long as its sample says."""

    ExtraEnvInfo = Seconds

    async def step(self, message_log: list[ChatMessage], extra_env_info: Seconds) -> StepOutcome:
        await asyncio.sleep(extra_env_info.seconds)
        return outcome("slept", terminated=True)


class Fleet:
    """One ingress replica with one generator replica and one environment replica, and how and when each call ends."""

    def __init__(self) -> None:
        self.generators = InProcessHandle({"g": SleepingReplica()})
        self.generator = RemoteGenerator(self.generators.unchecked)
        path = f"{__name__}:SleepingEnvironment"
        self.environments = InProcessHandle({"e": EnvironmentHost("sleeping", path, {}, step_timeout_s=None)})
        self.environment = RemoteEnvironment("sleeping", self.environments.unchecked)
        self.ends: dict[str, tuple[str, float]] = {}

    async def _end(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
            how = ENDED
        except (GenerationLost, EnvironmentLost) as lost:
            how = str(lost)
        self.ends[name] = how, virtual_time.now()

    async def generation(self, name: str, seconds: int) -> None:
        request = GenerationRequest(name, [1], seconds, (), SamplingOptions(), rollout_id=name)
        await self._end(name, self.generator.generate(request))

    async def chat(self, name: str, seconds: int) -> None:
        async def read() -> None:
            request = ServedRequest(name, [1], seconds, (), SamplingOptions(), rollout_id=name)
            async for _ in self.generator.serve(request):
                pass

        await self._end(name, read())

    async def step(self, name: str, seconds: float, lockstep_id: str = "") -> None:
        log: list[ChatMessage] = [{"role": "assistant", "content": "A"}]
        request = StepRequest(log, {"seconds": seconds}, "request", name, step_id=name, lockstep_id=lockstep_id)
        await self._end(name, self.environment.step(request))

    async def hang(self) -> None:
        self.generators.set_hanging("g", True)
        self.environments.set_hanging("e", True)

    async def list_replicas(self, generator: str, environment: str) -> None:
        self.generators.list_replicas(generator)
        self.environments.list_replicas(environment)

    async def ended(self, *calls: tuple[float, Coroutine[Any, Any, None]]) -> dict[str, tuple[str, float]]:
        """Makes each call at its time; says how and when each has ended."""

        async def at(time: float, call: Coroutine[Any, Any, None]) -> None:
            await asyncio.sleep(time - virtual_time.now())
            await call

        await asyncio.gather(*(at(time, call) for time, call in calls))
        return {name: (how, round(at, 1)) for name, (how, at) in self.ends.items()}


async def test_long_generations_outlast_a_chat_stream_beside_them() -> None:
    fleet = Fleet()
    calls = (0, fleet.generation("short", 2)), (0, fleet.generation("long", 60)), (1, fleet.chat("chat", 30))
    assert await fleet.ended(*calls) == {"short": (ENDED, 2), "chat": (ENDED, 31), "long": (ENDED, 60)}


async def test_quiet_chats_outlast_short_generations_beside_them() -> None:
    fleet = Fleet()
    short = [(number / 2, fleet.generation(f"short {number}", 1)) for number in range(100)]
    at = await fleet.ended((0, fleet.chat("quiet", 60)), (1, fleet.chat("quiet too", 50)), *short)
    assert (at["quiet"], at["quiet too"]) == ((ENDED, 60), (ENDED, 51))
    assert [at[f"short {number}"] for number in range(100)] == [(ENDED, 1 + number / 2) for number in range(100)]


@pytest.mark.parametrize(("long", "short"), [("L", ""), ("", "L")])
async def test_a_long_step_outlasts_short_ones_beside_it_in_lockstep_or_not(long: str, short: str) -> None:
    fleet = Fleet()
    others = [(number, fleet.step(f"short {number}", 1, short)) for number in range(60)]
    at = await fleet.ended((0, fleet.step("first", 2, long)), (0, fleet.step("long", 90, long)), *others)
    assert (at["first"], at["long"]) == ((ENDED, 2), (ENDED, 90))
    assert [at[f"short {number}"] for number in range(60)] == [(ENDED, 1 + number) for number in range(60)]


async def test_traffic_of_every_kind_is_lost_when_the_replica_hangs() -> None:
    fleet = Fleet()
    at = await fleet.ended(
        (0, fleet.generation("generation", 600)),
        (0, fleet.chat("chat", 600)),
        (0, fleet.chat("quiet", 600)),
        (0, fleet.step("step", 600)),
        (0, fleet.step("lockstep", 600, "L")),
        (20.5, fleet.hang()),
        (25, fleet.generation("later", 600)),
    )
    lost = "The generator replica was silent for 10 heartbeats.", 30
    lost_step = "The replica of environment 'sleeping' was silent for 30 heartbeats.", 50
    assert at == dict.fromkeys(("generation", "chat", "quiet", "later"), lost) | dict.fromkeys(
        ("step", "lockstep"), lost_step
    )


async def test_calls_outlast_a_moment_in_which_their_replica_is_not_listed() -> None:
    fleet = Fleet()
    at = await fleet.ended(
        (0, fleet.generation("old", 60)),
        (0, fleet.step("old step", 90)),
        (1, fleet.list_replicas("other", "other")),
        (2, fleet.generation("short", 2)),
        (2, fleet.step("short step", 2)),
        (5, fleet.list_replicas("g", "e")),
        (6, fleet.generation("short too", 2)),
        (6, fleet.generation("new", 60)),
        (6, fleet.step("short step too", 2)),
        (6, fleet.step("new step", 90)),
    )
    assert [at[name] for name in ("old", "new", "old step", "new step")] == [(ENDED, end) for end in (60, 66, 90, 96)]
