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
from typing import Any
from uuid import uuid4

import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deployments.tasks.bridges.model_endpoint import MODEL
from deployments.tasks.bridges.verifiers import TaskCache, VerifiersInfo, loaded_env, problem_of, rewards_of
from rollout_env import SampleRejected


class VerifiersHarness:
    """One taskset with its environment."""

    def __init__(self, taskset: dict[str, Any], environment: str = "", config: dict[str, Any] | None = None) -> None:
        """The arguments are those of `VerifiersEnvironment`."""
        self._env = loaded_env(taskset, environment, config)
        self._tasks = TaskCache(self._env.taskset)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/", self._play, methods=["POST"])])

    async def _play(self, request: Request) -> Response:
        """Answers with the rewards by name; with 422 for no task of the taskset, and 500 for an episode that failed."""
        run = await request.json()
        try:
            info = VerifiersInfo.model_validate(run["sample"].get("extra_env_info") or {})
            task = self._tasks.at(info.index)
        except (SampleRejected, ValueError) as error:
            return PlainTextResponse(str(error), status_code=422)
        episode = await self._episode(task, run["base_url"], run["api_key"])
        if problem := problem_of(episode):
            return PlainTextResponse(f"the episode failed: {problem}", status_code=500)
        return JSONResponse(rewards_of(episode))

    async def _episode(self, task: vf.Task, base_url: str, api_key: str) -> Any:
        # verifiers keeps a client for each address while it serves, and each rollout has an address of its own: what
        # serves a rollout ends with it.
        env = copy.copy(self._env)
        with key_variable(api_key) as variable:
            client = vf.EvalClientConfig(base_url=f"{base_url.removesuffix('/v1')}/v1", api_key_var=variable)
            async with env.serving():
                return await env.run_episode(task, vf.ModelContext(model=MODEL, client=client))


@contextmanager
def key_variable(api_key: str) -> Iterator[str]:
    """The name of an environment variable that has the key for the length of the block: verifiers reads keys so."""
    name = f"SESSION_KEY_{uuid4().hex}"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays a taskset of verifiers against sessions.")
    parser.add_argument("taskset", type=json.loads, help='its config as JSON, such as {"id": "my_taskset"}')
    parser.add_argument("--environment", default="", help="id of an Env that plays it; by default the taskset's own")
    parser.add_argument("--config", type=json.loads, default={}, help="further fields of the Env's config, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="only who is trusted may reach it: it asks for no token")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--until-input-ends", action="store_true", help="end with the process that started this one")
    options = parser.parse_args()
    harness = VerifiersHarness(options.taskset, options.environment, options.config)
    server = uvicorn.Server(
        uvicorn.Config(harness.app(), host=options.host, port=options.port, log_level="warning", access_log=False)
    )
    if options.until_input_ends:
        threading.Thread(target=end_with_input, args=(server,), daemon=True).start()
    server.run()


def end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
