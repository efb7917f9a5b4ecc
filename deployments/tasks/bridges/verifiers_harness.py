"""Plays environments of verifiers by verifiers itself, against sessions of the service: the harness of a task's agent.

verifiers' own client speaks to the session of a rollout, and the rewards of the environment are the rollout's. Nothing
of the environment is changed. Runs in a Python environment of its own:

    python -m deployments.tasks.bridges.verifiers_harness '{"id": "my_taskset"}' --port 8200

`POST /` is what `deployments/agents/programs.py` sends; `extra_env_info.index` of its sample names the task.
"""

import argparse
import copy
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any
from uuid import uuid4

import uvicorn
import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

_HARNESS_ID = "one_call"
MODEL = "policy"
_MOST_TASKS = 2**20
"""Bound of a taskset, which may be endless: all tasks up to the one that a sample names are held."""


class _VerifiersInfo(BaseModel):
    """The `extra_env_info` of a sample; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    index: int = Field(ge=0, lt=_MOST_TASKS)
    """Index of the task in the taskset."""


class _VerifiersHarness:
    """One taskset with its environment. Its tasks are made on demand and kept."""

    def __init__(self, taskset: dict[str, Any], environment: str, config: dict[str, Any]) -> None:
        """The arguments are those of the command line."""
        self._env = _loaded_env(taskset, environment, config)
        self._loading: Iterator[vf.Task] = iter(self._env.taskset)
        self._tasks: list[vf.Task] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/", self._play, methods=["POST"])])

    async def _play(self, request: Request) -> Response:
        """Answers with the rewards by name; with 422 for no task of the taskset, and 500 for an episode that failed."""
        run = await request.json()
        try:
            task = self._task(_VerifiersInfo.model_validate(run["sample"].get("extra_env_info") or {}).index)
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=422)
        episode = await self._episode(task, run["base_url"], run["api_key"])
        if problem := _problem_of(episode):
            return PlainTextResponse(f"the episode failed: {problem}", status_code=500)
        return JSONResponse(_rewards_of(episode))

    def _task(self, index: int) -> vf.Task:
        """Raises `ValueError` if the taskset has no such task."""
        self._tasks += islice(self._loading, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise ValueError(f"extra_env_info.index: the taskset has {len(self._tasks)} tasks, from 0.")
        return self._tasks[index]

    async def _episode(self, task: vf.Task, base_url: str, api_key: str) -> Any:
        # verifiers keeps a client for each address while it serves, and each rollout has an address of its own: what
        # serves a rollout ends with it.
        env = copy.copy(self._env)
        with _key_variable(api_key) as variable:
            client = vf.EvalClientConfig(base_url=f"{base_url.removesuffix('/v1')}/v1", api_key_var=variable)
            async with env.serving():
                return await env.run_episode(task, vf.ModelContext(model=MODEL, client=client))


@contextmanager
def _key_variable(api_key: str) -> Iterator[str]:
    """The name of an environment variable that has the key for the length of the block: verifiers reads keys so."""
    name = f"SESSION_KEY_{uuid4().hex}"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


def _loaded_env(taskset: dict[str, Any], environment: str, config: dict[str, Any]) -> Any:
    """The environment that plays a taskset. Its agents ask the model once a turn unless `config` names a harness."""
    _register_harness()
    env_class = environment_class(taskset["id"], environment)
    config_class = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    agents = [name for name, field in config_class.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    by_default = {"harness": {"id": _HARNESS_ID}, "runtime": {"type": "subprocess"}}
    given = config | {name: by_default | config.get(name, {}) for name in agents}
    return env_class(config_class.model_validate({"id": environment, "taskset": taskset, **given}))


def _problem_of(episode: Any) -> str:
    """Why an episode failed; empty if it did not."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
    return "" if episode.ok else reasons or "no reason is given"


def _rewards_of(episode: Any) -> dict[str, float]:
    """The rewards of all traces by name, after the agent's name if there are several."""
    several = len(episode.traces) > 1
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            full_name = f"{trace.agent.name}_{name}" if several else name
            rewards[full_name] = rewards.get(full_name, 0.0) + (0.0 if reward is None else float(reward.value))
    return rewards or {"reward": 0.0}


class _OneCallConfig(vf.HarnessConfig):
    """The config of `_OneCallHarness`, without further fields."""


class _OneCallHarness(vf.Harness[_OneCallConfig]):
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
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            completed = await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout=completed.choices[0].message.content or "", stderr="")


def _register_harness() -> None:
    """Lets verifiers find the harness by its id: it imports plugins by name."""
    module = ModuleType(_HARNESS_ID)
    module.__dict__.update(__all__=["_OneCallHarness"], _OneCallHarness=_OneCallHarness)
    sys.modules[_HARNESS_ID] = module


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays a taskset of verifiers against sessions.")
    parser.add_argument("taskset", type=json.loads, help='its config as JSON, such as {"id": "my_taskset"}')
    parser.add_argument("--environment", default="", help="id of an Env that plays it; by default the taskset's own")
    parser.add_argument("--config", type=json.loads, default={}, help="further fields of the Env's config, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="only who is trusted may reach it: it asks for no token")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--until-input-ends", action="store_true", help="end with the process that started this one")
    options = parser.parse_args()
    harness = _VerifiersHarness(options.taskset, options.environment, options.config)
    server = uvicorn.Server(
        uvicorn.Config(harness.app(), host=options.host, port=options.port, log_level="warning", access_log=False)
    )
    if options.until_input_ends:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run()


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
