"""Runs the agents of one task as an environment whose one step is a whole run.

Its deployment is a host of environments (`deployments/environments/host.py`), so agents get replicas that scale with
what runs, queues, batches, cancellation, heartbeats and draining. Steps may last for hours, and end with their caller.
`PlainAgentTask` is the environment of a task whose agent brings everything.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from deployments.agents.command_program import CommandProgram
from deployments.agents.game_program import GameProgram
from deployments.agents.harbor_program import HarborProgram
from deployments.agents.programs import AgentCall, AgentProgram, CallableProgram, HarnessProgram, RunNotes
from deployments.agents.settings import AgentSettings
from deployments.failures import AgentTimedOut, RolloutFailure
from rollout_env import ChatMessage, Reference, SampleRejected, StepOutcome, TaskEnvironment, TemporaryFailure

RUNS_OF_TASK = f"{__name__}:AgentRunsOfTask"
"""Import path of the environment that the host loads."""
SECONDS = "agent_s"
"""The metric with the wall time of a run."""
ENDED_WITHIN_S = 1.0
"""Time limit for a cancelled run to end; a function that takes longer is abandoned."""
_NO_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
HOST_GRACE_S = 30.0
"""Extra time after a run's timeout in which its program ends it, before the host fails the step."""


class AgentRunsOfTask(TaskEnvironment):
    """A step is a whole run: `extra_env_info` is the call, and the reward is the agent's own."""

    description = "Runs the agent of a task."
    ExtraEnvInfo = AgentCall

    def __init__(self, settings: AgentSettings) -> None:
        """Raises `AgentNotLoadable`, `ProviderUnusable`, `HarborTaskRefused` or `KeyMissing`."""
        places = settings.places
        # As many more have their sandboxes made, in the order in which they get a place.
        self.max_concurrent_steps = 2 * places if settings.harbor is not None and places is not None else places
        self._program = _program_of(settings)
        self._timeout_s = settings.timeout_s

    async def step(self, message_log: list[ChatMessage], extra_env_info: AgentCall) -> StepOutcome:  # noqa: ARG002
        """Runs the agent. An outcome with a reward `{}` is that of an agent that gives none.

        Raises:
            AgentFailed: it failed, or was ended after its time.
            EnvironmentLost: it cannot be run just now.
        """
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        said = RunNotes()
        reward = await self._run(extra_env_info, said)
        return StepOutcome(None, reward, terminated=True, metrics={**said.metrics, SECONDS: loop.time() - begun_at})

    async def _run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        running = asyncio.create_task(self._program.run(call, said))
        try:
            async with asyncio.timeout(self._timeout_s) as said.limit:
                await asyncio.wait([running])
        except TimeoutError:
            pass
        finally:
            if is_late := not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=ENDED_WITHIN_S)
        if not is_late or (running.done() and not running.cancelled() and running.exception() is None):
            return running.result()
        raise AgentTimedOut(f"The agent was ended after {self._timeout_s:g} s, its timeout_s. {said.sentence}".strip())

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"extra_env_info": {"base_url": "http://127.0.0.1", "api_key": "", "sample": {}}}] * count


def _program_of(settings: AgentSettings) -> AgentProgram:
    """Raises `AgentNotLoadable`, `ProviderUnusable`, `HarborTaskRefused` or `KeyMissing`."""
    if settings.harbor is not None:
        return HarborProgram(settings, settings.harbor)
    if settings.import_path is not None:
        return CallableProgram(settings.import_path)
    if settings.command is not None:
        return CommandProgram(settings.command)
    if settings.game is not None:
        return GameProgram(settings.game)
    assert settings.harness is not None
    return HarnessProgram(settings.harness)


class _AnyInfo(BaseModel):
    """Fields for the agent, whatever they are."""

    model_config = ConfigDict(extra="allow")


class PlainAgentTask(TaskEnvironment):
    """Describes the task for `GET /tasks`. Its samples come from the task's `data`, or from whoever posts them."""

    description = "Played by an agent, which says what its rollouts are worth."
    ExtraEnvInfo = _AnyInfo

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """Is never called. Raises `SampleRejected`."""
        raise SampleRejected("This task judges nothing: its agent gives the reward.")

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        numbers = range(seed, seed + count)
        return [
            {"messages": [{"role": "user", "content": f"Question {number}"}], "extra_env_info": {}}
            for number in numbers
        ]


class ScriptedAgent(PlainAgentTask):
    """An agent whose model gives one reply, as often as it is asked: for `rollout env certify`.

    Its rewards are the agent's own. A step is a whole run.
    """

    def __init__(
        self, settings: dict[str, Any], samples: list[dict[str, Any]], solutions: Sequence[str] = (), best: float = 1.0
    ) -> None:
        """Starts the agent as `agent` of an environment's entry does.

        Args:
            settings: that `agent`.
            samples: those that are played.
            solutions: a reply that solves each of them, with the reward `best`; where there are none, nobody knows it.
        """
        agent = AgentSettings.model_validate(settings)
        self._runs, self._most_calls = AgentRunsOfTask(agent), agent.limits.max_calls
        self._samples, self._solutions, self._best = samples, solutions, best

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # type: ignore[override]
        """Runs the agent. Raises `SampleRejected` or `TemporaryFailure` where it fails."""
        sample: dict[str, Any] = {"task_name": "task", "messages": [dict(message_log[0])]}
        sample["extra_env_info"] = extra_env_info.model_dump()
        with _model_that_says(message_log[-1]["content"], self._most_calls) as url:
            try:
                outcome = await self._runs.step([], AgentCall(base_url=url, api_key="any", sample=sample))
            except RolloutFailure as error:
                raise (TemporaryFailure if error.retryable else SampleRejected)(str(error)) from error
        return replace(outcome, metrics=None)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The solution of the sample."""
        known = dict(zip(map(str, self._samples), self._solutions, strict=False))
        return Reference([known[str(sample)]] if str(sample) in known else None, best=self._best)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The samples in order, beginning with number `seed`, and again from the first one after the last."""
        return [self._samples[number % len(self._samples)] for number in range(seed, seed + count)]


@contextmanager
def _model_that_says(reply: str, most_calls: int) -> Iterator[str]:
    """The address of a server of chat completions, for the block, which answers so many calls with the reply."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            message = {"role": "assistant", "content": reply}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "any", "usage": _NO_USAGE}
            body = orjson.dumps(answer | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})
            self.send_response(200 if next(numbers) < most_calls else 403)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
