"""A stand-in for the service, over real sockets: answers as the contract says, or as a test scripts it."""

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers

from rollout_client.arrow.schema import ARROW
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder

Json = dict[str, Any]
Responder = Callable[[Json], Response]
NDJSON = "application/x-ndjson"
HUNG_UP_WITHIN_S = 40.0
"""For `ScriptedService.hangs` and `.hung_up`: far more than it takes, for machines that are busy."""
REJECTED: Json = {
    "type": "urn:rollout:problem:invalid-request",
    "title": "The request is not valid; nothing was started",
    "status": 422,
    "detail": "samples[0].task_name: there is no task 'maths'; the known ones are math.",
    "errors": [
        {
            "field": "samples[0].task_name",
            "message": "there is no task 'maths'; the known ones are math",
            "value": "maths",
        }
    ],
}
DIED: Json = {"kind": "generation", "message": "The replica died.", "retryable": True}
SUMMARY: Json = {
    "request_id": "r1",
    "metrics": {"mean_total_reward": 0.5, "total_turns": 4.0, "per_worker_token_counts": {"x7": 4}},
    "policy": {"oldest": "0", "newest": "0", "current": "0"},
}

INFO: Json = {
    "model": {"name": "org/model", "revision": "4e20de", "vocab_size": 262, "max_model_len": 100},
    "tokenizer": {
        "vocabulary_sha256": "0123456789abcdef",
        "vocabulary_size": 260,
        "encodings": [],
        "chat_template_sha256": None,
        "rendered_chat": None,
    },
    "limits": {"max_seq_len": 100, "admission": {"max_rollouts": 9, "max_tokens": None}, "of_a_newer_service": None},
    "versions": {"service": "0.9", "contract": "1.7", "engine": "vllm 0.32", "ray": "2.60", "transformers": "5.19"},
    "policy_version": 3,
    "tasks": ["math", "[code]"],
    "follow": None,
    "keeps_records": True,
}


def sample(task_name: str = "math", **fields: Any) -> Json:
    return {"task_name": task_name, "messages": [{"role": "user", "content": "What is 1 + 1?"}], **fields}


def result(idx: int = 0, generation_index: int = 0, content: str = "\\boxed{2}", **fields: Any) -> Json:
    prompt = {"role": "user", "content": "What is 1 + 1?", "token_ids": [1, 2]}
    response = {
        "role": "assistant",
        "content": content,
        "token_ids": [3, 4],
        "generation_logprobs": [-0.25, -0.75],
        "finish_reason": "stop",
        "reward": 1.0,
    }
    ending = {"total_reward": 1.0, "terminated": True, "truncated": False, "max_turns_reached": False}
    counts = {"turn_count": 1, "total_tokens": 2, "assistant_tokens": 2, "env_tokens": 0, "turn_gen_tokens": [2]}
    return {
        "idx": idx,
        "generation_index": generation_index,
        "task_name": "math",
        "message_log": [prompt, response],
        "rewards": {},
        "status": "completed",
        "extra_env_info": {"ground_truth": "2"},
        "metrics": counts | ending,
        **ending,
        **fields,
    }


CLIPPED = result()
CLIPPED["message_log"][1]["finish_reason"] = "length"
"""Its length has cut its response."""


def results_of(body: Json) -> list[Json]:
    return [
        result(posted.get("idx", place), generation_index)
        for place, posted in enumerate(body["samples"])
        for generation_index in range(body.get("num_generations", 1))
    ]


def lines_of(body: Json) -> list[Json]:
    """The last sample first: nothing may rely on the order."""
    placed = [{"position": place, "sample": played} for place, played in enumerate(results_of(body))]
    return [*reversed(placed), {"summary": SUMMARY}]


def ndjson(*lines: Json) -> Response:
    async def stream() -> AsyncIterator[bytes]:
        for line in lines:
            yield json.dumps(line, ensure_ascii=False).encode() + b"\n"

    return StreamingResponse(stream(), media_type=NDJSON)


def arrow(*results: Json | SampleResult) -> Response:
    answer = ArrowResponseEncoder()
    for position, played in enumerate(results):
        answer.add(position, SampleResult.model_validate(played))
    return Response(b"".join(answer.body(RolloutSummary(**SUMMARY))), media_type=ARROW)


def problem(document: Json, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(document, document["status"], headers, media_type="application/problem+json")


def unavailable(headers: dict[str, str] | None = None) -> Response:
    document = {"type": "about:blank", "title": "Not now", "status": 503, "detail": "No replica is ready."}
    return problem(document, headers)


def overloaded(retry_after_s: int = 2) -> Response:
    document = {
        "type": "urn:rollout:problem:overloaded",
        "title": "The service is full; nothing was started",
        "status": 429,
        "detail": "Everything is in flight.",
    }
    return problem(document, {"Retry-After": str(retry_after_s)})


class ScriptedService:
    """Answers `POST /rollout` and `GET /readyz` with the next of its scripts, and by itself when there is none left."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Json] = []
        self.headers: list[Headers] = []
        """Of each `POST /rollout`."""
        self.rollouts: deque[Responder] = deque()
        self.readiness: deque[Response] = deque()
        self.info: Json | None = None
        """The answer of `GET /info`, which is 404 without it."""
        self.vocabulary: list[str | None] = []
        self.benchmark: list[str] = []
        """Ids of the samples of any task, which come again after the last one; without them samples have no end."""
        self.info_requests: list[str] = []
        """The paths."""
        self.hangs = threading.Event()
        """Set when a stream of `hanging` has sent its lines."""
        self.hung_up = threading.Event()
        """Set when a client left a stream of `hanging` before its end."""
        self.app = FastAPI()
        self._add_routes()

    def hanging(self, *lines: Json) -> Response:
        """Sends `lines`, then nothing more, and does not end."""

        async def stream() -> AsyncIterator[bytes]:
            try:
                for line in lines:
                    yield json.dumps(line).encode() + b"\n"
                self.hangs.set()
                await asyncio.sleep(60)
            finally:
                self.hung_up.set()

        return StreamingResponse(stream(), media_type=NDJSON)

    def _add_routes(self) -> None:
        @self.app.post("/rollout")
        async def rollout(request: Request) -> Response:
            body: Json = await request.json()
            self.bodies.append(body)
            self.headers.append(request.headers)
            if self.rollouts:
                return self.rollouts.popleft()(body)
            if request.headers["accept"] == NDJSON:
                return ndjson(*lines_of(body))
            if request.headers["accept"] == ARROW:
                return arrow(*results_of(body))
            return JSONResponse({**SUMMARY, "samples": results_of(body)})

        @self.app.get("/readyz")
        async def readyz() -> Response:
            return self.readiness.popleft() if self.readiness else JSONResponse({"status": "ready"})

        @self.app.get("/tasks")
        async def tasks() -> Json:
            types = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
            field = {"anyOf": types, "description": "The [right] answer."}
            schema = {"properties": {"ground_truth": field}, "required": ["ground_truth"]}
            example = sample(note="long " * 40)
            return {"tasks": [{"task_name": "math", "description": "Sums.", "fields": schema, "example": example}]}

        @self.app.get("/tasks/{task_name:path}/samples")
        async def samples(task_name: str, count: int, start: int, seed: int | None = None) -> Response:
            if task_name == "maths":
                return problem(REJECTED)
            made = [sample(task_name, seed=seed) for _ in range(count)]
            page: Json = {"samples": made, "next_start": start + count}
            if self.benchmark:
                for place, each in enumerate(made):
                    each["id"] = self.benchmark[place % len(self.benchmark)]
                page["sample_count"] = len(self.benchmark)
            return JSONResponse(page)

        @self.app.get("/info")
        async def info() -> Response:
            self.info_requests.append("/info")
            if self.info is None:
                return problem({"type": "about:blank", "title": "Not Found", "status": 404, "detail": "No such route."})
            return JSONResponse(self.info)

        @self.app.get("/info/vocabulary")
        async def vocabulary() -> Json:
            self.info_requests.append("/info/vocabulary")
            return {"tokens": self.vocabulary}


class QuickServer(uvicorn.Server):
    """Stops within milliseconds of `should_exit`, where uvicorn's own server takes a fifth of a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = self.server_state.tasks
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.config.timeout_graceful_shutdown)
            for task in late:
                task.cancel()
        await self.lifespan.shutdown()


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serves on a free port of loopback for the length of the block."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = QuickServer(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@contextmanager
def running(service: ScriptedService) -> Iterator[ScriptedService]:
    """As `served`, with the address in `url`."""
    with served(service.app) as service.url:
        yield service
