"""Environments of verifiers, played by steps. Runs in a Python environment of its own, under `HostedEnvironment`.

verifiers drives an episode itself and asks an OpenAI-compatible endpoint for each turn. Here that endpoint belongs to
the episode's session: the request of a turn becomes an observation, and the response of the policy, which the next step
brings, becomes the answer. So single-turn and multi-turn environments are played without a change.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar
from uuid import uuid4

import uvicorn
import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

from rollout_env import ChatMessage, SampleRejected, Session, StartOutcome, StepOutcome, TaskEnvironment

HARNESS_ID = "played_by_steps"
MODEL = "policy"
MOST_TASKS = 2**20
"""Of a taskset, which may have no end. All before the one that a sample names are made and held."""
MOST_FIRST = 2**16
"""Places at which examples may begin."""


class VerifiersInfo(BaseModel):
    """The `extra_env_info` of an episode; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    index: int = Field(ge=0, lt=MOST_TASKS)
    """Of the task in the taskset."""


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
        register_harness()
        env_class = environment_class(taskset["id"], environment)
        config_class = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
        agents = [
            name for name, field in config_class.model_fields.items() if isinstance(field.default, vf.AgentConfig)
        ]
        given = dict(config or {})
        for name in agents:
            by_default = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
            given[name] = {**by_default, **given.get(name, {})}
        self._env = env_class(config_class.model_validate({"id": environment, "taskset": taskset, **given}))
        self._loading: Iterator[vf.Task] = iter(self._env.taskset)
        self._tasks: list[vf.Task] = []
        self._serving: Serving | None = None
        self.description = f"{taskset['id']} of verifiers."  # type: ignore[misc]

    async def start(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - the prompt of the task follows it
        extra_env_info: VerifiersInfo,
    ) -> StartOutcome:
        """Adds what the environment asks first."""
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
        if self._serving is None:
            self._serving = Serving(self._env)
        endpoint = await self._serving.started()
        episode = EpisodeSession(self._env, self._task(info.index), endpoint)
        try:
            await episode.wait_for_turn()
        except asyncio.CancelledError:
            await episode.close()
            raise
        if not episode.asked:
            await episode.close()
            raise SampleRejected(f"Task {info.index} ended before the first turn: {episode.problem()}")
        return episode

    def _task(self, index: int) -> vf.Task:
        """Raises `SampleRejected` if the taskset has no such task."""
        self._tasks += islice(self._loading, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise SampleRejected(f"extra_env_info.index: the taskset has {len(self._tasks)} tasks, from 0.")
        return self._tasks[index]

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The tasks from place `seed` on; from the first one again after the last one, or after `MOST_FIRST`."""
        seed %= MOST_FIRST
        try:
            self._task(seed + count - 1)
        except SampleRejected:
            seed %= len(self._tasks)
            return [{"extra_env_info": {"index": (seed + number) % len(self._tasks)}} for number in range(count)]
        return [{"extra_env_info": {"index": seed + number}} for number in range(count)]

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.stop()


class EpisodeSession(Session):
    """One episode, which waits for the response of the policy or has ended."""

    def __init__(self, env: Any, task: vf.Task, endpoint: "ModelEndpoint") -> None:
        self._endpoint = endpoint
        self._key = uuid4().hex
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[ChatMessage]]] = asyncio.Queue()
        self._answer: asyncio.Future[ChatMessage] | None = None
        self.asked: list[ChatMessage] = []
        """The messages that are new in this turn; empty after the end."""
        endpoint.sessions[self._key] = self._requests
        client = vf.EvalClientConfig(base_url=f"{endpoint.url}/{self._key}/v1", api_key_var="HOME")
        context = vf.ModelContext(model=MODEL, client=client)
        self._episode = asyncio.get_running_loop().create_task(env.run_episode(task, context))

    async def wait_for_turn(self) -> None:
        """Returns when the environment asks for a response, or the episode has ended."""
        waiting = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({waiting, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            body, self._answer = waiting.result()
            self.asked = new_messages(body["messages"])
        else:
            waiting.cancel()
            self.asked = []

    async def step(self, message_log: list[ChatMessage], extra_env_info: VerifiersInfo) -> StepOutcome:  # noqa: ARG002
        """Gives the response to the environment.

        Raises:
            SampleRejected: the episode has ended.
            RuntimeError: the episode failed.
        """
        if self._answer is None or self._answer.done():
            raise SampleRejected("The episode has ended.")
        self._answer.set_result(message_log[-1])
        await self.wait_for_turn()
        if self.asked:
            return StepOutcome(self.asked, 0.0, terminated=False)
        if problem := self.problem():
            raise RuntimeError(f"the episode failed: {problem}")
        return StepOutcome({"role": "user", "content": ""}, rewards_of(self._episode.result()), terminated=True)

    def problem(self) -> str:
        """Why the episode that has ended failed; empty if it did not."""
        episode = self._episode.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return (
            ""
            if episode.ok
            else "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason is given"
        )

    async def close(self) -> None:
        del self._endpoint.sessions[self._key]
        if self._answer is not None:
            self._answer.cancel()
        self._episode.cancel()
        await asyncio.wait([self._episode])


class Serving:
    """What all episodes share: the resources of the environment and the endpoint. It lives in a task of its own."""

    def __init__(self, env: Any) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint: asyncio.Future[ModelEndpoint] = loop.create_future()
        self._stopping = asyncio.Event()
        self._task = loop.create_task(self._live(env))

    async def started(self) -> "ModelEndpoint":
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


class EndpointServer(uvicorn.Server):
    """Leaves the signals to the server of the host."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ModelEndpoint:
    """`POST /KEY/v1/chat/completions`, answered by the session of that key."""

    def __init__(self) -> None:
        self.sessions: dict[str, asyncio.Queue[tuple[dict[str, Any], asyncio.Future[ChatMessage]]]] = {}
        route = Route("/{key}/v1/chat/completions", self._complete, methods=["POST"])
        app = Starlette(routes=[route])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
        self._server = EndpointServer(config)
        self.url = ""

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task

    async def _complete(self, request: Request) -> Response:
        requests = self.sessions.get(request.path_params["key"])
        if requests is None:
            return JSONResponse({"error": {"message": "The episode has ended."}}, status_code=410)
        body = await request.json()
        answer: asyncio.Future[ChatMessage] = asyncio.get_running_loop().create_future()
        requests.put_nowait((body, answer))
        try:
            message = completion_message(await answer)
        except asyncio.CancelledError:
            return JSONResponse({"error": {"message": "The episode was cut off."}}, status_code=410)
        if body.get("stream"):
            return StreamingResponse(chunks_of(message), media_type="text/event-stream")
        return JSONResponse(completion("chat.completion", message=message))


def completion_message(response: ChatMessage) -> dict[str, Any]:
    """The response in OpenAI's form, with the calls that the service has parsed."""
    message: dict[str, Any] = {"role": "assistant", "content": response.get("parsed_content", response["content"])}
    if calls := response.get("tool_calls"):
        message["tool_calls"] = calls
    return message


def completion(kind: str, **choice: Any) -> dict[str, Any]:
    message = choice.get("message") or choice.get("delta") or {}
    reason = None if kind.endswith("chunk") and message else "tool_calls" if message.get("tool_calls") else "stop"
    choices = [{"index": 0, "finish_reason": reason, **choice}]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {"id": uuid4().hex, "object": kind, "created": 0, "model": MODEL, "choices": choices, "usage": usage}


async def chunks_of(message: dict[str, Any]) -> AsyncIterator[str]:
    """The message as a stream of one piece."""
    calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
    delta = {**message, "tool_calls": calls} if calls else message
    for chunk in (
        completion("chat.completion.chunk", delta=delta),
        completion("chat.completion.chunk", delta={}, finish_reason="tool_calls" if calls else "stop"),
    ):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def new_messages(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Those after the last response."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return [chat_message(message) for message in messages[places[-1] + 1 if places else 0 :]]


def chat_message(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    chat: ChatMessage = {"role": message["role"], "content": content}
    if "tool_call_id" in message:
        chat["tool_call_id"] = message["tool_call_id"]
    if message.get("name"):
        chat["name"] = message["name"]
    return chat


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
    """Of `StepsHarness`."""


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
