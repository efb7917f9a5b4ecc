"""The loop that a trainer would write itself: asyncio over vLLM's OpenAI-compatible server in another process."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from benchmarks.process_group import ProcessGroup, started
from deployments.generation.settings import EngineSettings
from service.startup.config import free_port

TIMEOUT_S = 600
JSON = {"content-type": "application/json"}
KEEP_CONNECTIONS = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
"""Seconds. By default the server would close its connections while it is suspended."""


@contextmanager
def openai_server(settings: EngineSettings, flags: Sequence[str] = ()) -> Iterator[tuple[str, ProcessGroup]]:
    """Starts `vllm serve` with the service's engine settings and further flags; yields its URL and its processes."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--host", "127.0.0.1"]
    command += [*flags_of(settings), *flags, "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **settings.process_variables, **KEEP_CONNECTIONS}
    with started(command, f"{url}/health", environment) as processes:
        yield url, processes


def flags_of(settings: EngineSettings) -> list[str]:
    flags = []
    for name, value in settings.engine_args().items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


async def open_session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=TIMEOUT_S),
        raise_for_status=True,
    )


class OpenAILoop:
    """Plays conversations against `/v1/completions`: token ids in, token ids and log-probabilities out.

    With aiohttp and orjson, the fastest libraries that a trainer could use: httpx, which the OpenAI package uses, takes
    several times their CPU time with hundreds of connections.
    """

    def __init__(self, url: str, model: str) -> None:
        self._runner = asyncio.Runner()
        self._model = model
        self._http = self._runner.run(open_session(url))

    def play(
        self, prompts: Sequence[list[int]], turns: int, reply: Sequence[int], sampling: dict[str, Any]
    ) -> list[list[int]]:
        """Returns the token ids of each rollout."""

        async def play_all() -> list[list[int]]:
            return await asyncio.gather(*(self._play_one(prompt, turns, reply, sampling) for prompt in prompts))

        return self._runner.run(play_all())

    async def _play_one(
        self, token_ids: list[int], turns: int, reply: Sequence[int], sampling: dict[str, Any]
    ) -> list[int]:
        for _ in range(turns):
            body = {"model": self._model, "prompt": token_ids, "logprobs": 0, "return_token_ids": True, **sampling}
            async with self._http.post("/v1/completions", data=orjson.dumps(body), headers=JSON) as answer:
                choice = orjson.loads(await answer.read())["choices"][0]
            if len(choice["logprobs"]["token_logprobs"]) != len(choice["token_ids"]):
                raise RuntimeError("vLLM's server gave another number of log-probabilities than of tokens.")
            token_ids = [*token_ids, *choice["token_ids"], *reply]
        return token_ids

    def close(self) -> None:
        self._runner.run(self._http.close())
        self._runner.close()
