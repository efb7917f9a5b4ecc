"""Environments of verifiers, played by steps. Runs in a Python environment of its own, under `HostedEnvironment`.

verifiers drives an episode itself and asks an OpenAI-compatible endpoint for each turn. Here that endpoint belongs to
the episode's session: the request of a turn becomes an observation, and the response of the policy, which the next step
brings, becomes the answer. So single-turn and multi-turn environments are played without a change.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict, Field
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

from deployments.tasks.bridges.model_endpoint import MODEL, ModelEndpoint, new_messages
from rollout_env import ChatMessage, SampleRejected, Session, StartOutcome, StepOutcome, TaskEnvironment

HARNESS_ID = "played_by_steps"
MOST_TASKS = 2**20
"""Bound of a taskset, which may be endless: all tasks up to the one that a sample names are held."""
MOST_FIRST = 2**16
"""Places at which examples may begin."""


class VerifiersInfo(BaseModel):
    """The `extra_env_info` of an episode; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    index: int = Field(ge=0, lt=MOST_TASKS)
    """Index of the task in the taskset."""


class VerifiersEnvironment(TaskEnvironment):
    """One episode a rollout. The rewards are those of its traces, by name, with their weights."""

    description: ClassVar[str] = "An environment of verifiers."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = VerifiersInfo

    def __init__(self, taskset: dict[str, Any], environment: str = "", config: dict[str, Any] | None = None) -> None:
        """Loads the taskset and its environment.

        Args:
            taskset: the config of the taskset; its `id` is the name of an installed package.
            environment: the id of an `Env` that plays the taskset; by default the taskset's own.
            config: further fields of the environment's config, such as those of its agents. An agent without `harness`
                talks to the model and has no tools; its `runtime` is by default this machine.
        """
        self._env = loaded_env(taskset, environment, config)
        self._tasks = TaskCache(self._env.taskset)
        self._shared: SharedResources | None = None
        self.description = f"{taskset['id']} of verifiers."  # type: ignore[misc]

    async def start(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - the prompt of the task follows it
        extra_env_info: VerifiersInfo,
    ) -> StartOutcome:
        """Adds the first request of the environment."""
        episode = await self._begun(extra_env_info)
        try:
            return StartOutcome(observation=episode.asked)
        finally:
            await episode.close()

    async def open_session(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - an episode begins at its own prompt
        extra_env_info: VerifiersInfo,
    ) -> Session:
        return await self._begun(extra_env_info)

    async def _begun(self, info: VerifiersInfo) -> "EpisodeSession":
        if self._shared is None:
            self._shared = SharedResources(self._env)
        endpoint = await self._shared.started()
        episode = EpisodeSession(self._env, self._tasks.at(info.index), endpoint)
        try:
            await episode.wait_for_turn()
        except asyncio.CancelledError:
            await episode.close()
            raise
        if not episode.asked:
            await episode.close()
            raise SampleRejected(f"Task {info.index} ended before the first turn: {episode.problem()}")
        return episode

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The tasks from place `seed` on; from the first one again after the last one, or after `MOST_FIRST`."""
        seed %= MOST_FIRST
        try:
            self._tasks.at(seed + count - 1)
        except SampleRejected:
            tasks = self._tasks.loaded
            return [{"extra_env_info": {"index": (seed + number) % tasks}} for number in range(count)]
        return [{"extra_env_info": {"index": seed + number}} for number in range(count)]

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.stop()


class TaskCache:
    """The tasks of a taskset, which are made on demand and kept."""

    def __init__(self, taskset: Any) -> None:
        self._loading: Iterator[vf.Task] = iter(taskset)
        self._tasks: list[vf.Task] = []

    @property
    def loaded(self) -> int:
        return len(self._tasks)

    def at(self, index: int) -> vf.Task:
        """Raises `SampleRejected` if the taskset has no such task."""
        self._tasks += islice(self._loading, max(0, index + 1 - self.loaded))
        if index >= self.loaded:
            raise SampleRejected(f"extra_env_info.index: the taskset has {self.loaded} tasks, from 0.")
        return self._tasks[index]


class EpisodeSession(Session):
    """One episode, which waits for the response of the policy or has ended."""

    def __init__(self, env: Any, task: vf.Task, endpoint: ModelEndpoint) -> None:
        self._closing = ExitStack()
        self._asking = self._closing.enter_context(endpoint.session())
        self.asked: list[ChatMessage] = []
        """The messages that are new in this turn; empty after the end."""
        client = vf.EvalClientConfig(base_url=self._asking.url, api_key_var="HOME")
        context = vf.ModelContext(model=MODEL, client=client)
        self._episode = asyncio.get_running_loop().create_task(env.run_episode(task, context))

    async def wait_for_turn(self) -> None:
        """Returns when the environment asks for a response, or the episode has ended."""
        waiting = asyncio.ensure_future(self._asking.next_request())
        try:
            await asyncio.wait({waiting, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            self.asked = new_messages(waiting.result()["messages"])
        else:
            waiting.cancel()
            self.asked = []

    async def step(self, message_log: list[ChatMessage], extra_env_info: VerifiersInfo) -> StepOutcome:  # noqa: ARG002
        """Gives the response to the environment.

        Raises:
            SampleRejected: the episode has ended.
            RuntimeError: the episode failed.
        """
        if not self._asking.can_be_answered:
            raise SampleRejected("The episode has ended.")
        self._asking.answer(message_log[-1])
        await self.wait_for_turn()
        if self.asked:
            return StepOutcome(self.asked, 0.0, terminated=False)
        if problem := self.problem():
            raise RuntimeError(f"the episode failed: {problem}")
        return StepOutcome(None, rewards_of(self._episode.result()), terminated=True)

    def problem(self) -> str:
        """Why the episode that has ended failed; empty if it did not."""
        return problem_of(self._episode.result())

    async def close(self) -> None:
        self._closing.close()
        self._episode.cancel()
        await asyncio.wait([self._episode])


class SharedResources:
    """The environment's resources and the endpoint, which all episodes share. Runs in its own task."""

    def __init__(self, env: Any) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint: asyncio.Future[ModelEndpoint] = loop.create_future()
        self._stopping = asyncio.Event()
        self._task = loop.create_task(self._live(env))

    async def started(self) -> ModelEndpoint:
        return await asyncio.shield(self._endpoint)

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.wait([self._task])

    async def _live(self, env: Any) -> None:
        try:
            async with env.serving():
                endpoint = ModelEndpoint()
                await endpoint.start()
                self._endpoint.set_result(endpoint)
                await self._stopping.wait()
                await endpoint.stop()
        except Exception as error:
            if self._endpoint.done():
                raise
            self._endpoint.set_exception(error)


def loaded_env(taskset: dict[str, Any], environment: str = "", config: dict[str, Any] | None = None) -> Any:
    """The environment that plays a taskset; the arguments are those of `VerifiersEnvironment`."""
    register_harness()
    env_class = environment_class(taskset["id"], environment)
    config_class = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    agents = [name for name, field in config_class.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    given = dict(config or {})
    for name in agents:
        by_default = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
        given[name] = {**by_default, **given.get(name, {})}
    return env_class(config_class.model_validate({"id": environment, "taskset": taskset, **given}))


def problem_of(episode: Any) -> str:
    """Why an episode failed; empty if it did not."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
    return "" if episode.ok else reasons or "no reason is given"


def rewards_of(episode: Any) -> dict[str, float]:
    """The rewards of all traces by name, after the agent's name if there are several."""
    several = len(episode.traces) > 1
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            full_name = f"{trace.agent.name}_{name}" if several else name
            rewards[full_name] = rewards.get(full_name, 0.0) + (0.0 if reward is None else float(reward.value))
    return rewards or {"reward": 0.0}


class StepsHarnessConfig(vf.HarnessConfig):
    """The config of `StepsHarness`, without further fields."""


class StepsHarness(vf.Harness[StepsHarnessConfig]):
    """Asks the model once in this process for each segment, without a program and without tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002 - the endpoint records the turn
        runtime: vf.Runtime,  # noqa: ARG002 - nothing runs there
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002 - verifiers refuses tasks with tools
        data: vf.TaskData,
    ) -> ProgramResult:
        from openai import AsyncOpenAI
        from verifiers.v1.dialects.chat import message_to_wire

        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            completed = await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout=completed.choices[0].message.content or "", stderr="")


def register_harness() -> None:
    """Lets verifiers find the harness by its id: it imports plugins by name."""
    module = ModuleType(HARNESS_ID)
    module.__dict__.update(__all__=["StepsHarness"], StepsHarness=StepsHarness)
    sys.modules[HARNESS_ID] = module
