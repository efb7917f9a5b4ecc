"""Mutated bodies against the routes that read them: JSON, Arrow, safetensors, images, and streams that none reads."""

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import aiohttp
import httpx
import numpy as np
import zstandard
from safetensors.numpy import save

from rollout_client.arrow.schema import ARROW
from rollout_client.contract.policy import SAFETENSORS
from tests.deployments.images.pictures import picture
from tests.endurance.fuzz.answers import answer_problems
from tests.endurance.fuzz.fuzzed_service import FuzzedService
from tests.endurance.fuzz.mutation import mutated_bytes, mutated_json, mutated_lines, mutated_safetensors

JSON = "application/json"
AT_ONCE = 8
ANSWER_TIMEOUT_S = 60.0
SESSION = "{session_id}"
LONG = {"limits": {"max_calls": 10_000}}
SAMPLES: list[dict[str, Any]] = [
    {
        "task_name": "math",
        "messages": [{"role": "user", "content": "What is 1 + 1?"}],
        "extra_env_info": {"ground_truth": "2"},
    },
    {
        "task_name": "math",
        "message_log": [{"role": "user", "content": "1", "token_ids": [49, 50, 51]}],
        "extra_env_info": {"ground_truth": "2"},
        "seed": 3,
    },
]
REQUEST = {
    "samples": SAMPLES,
    "num_generations": 2,
    "sampling": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "stop_strings": ["!"]},
    "max_rollout_turns": 2,
    "deadline_s": 20.0,
    "policy": {"min_version": 0},
    "keep": {"per_group": 1},
}
ROLLOUT = json.dumps(REQUEST).encode()
SCORE = {"sequences": [{"token_ids": [49, 50, 51, 52], "start": 1}], "top_k": 2}
WEIGHTS = save(
    {
        "model.embed_tokens.weight": np.zeros((262, 8), np.float16),
        "model.norm.weight": np.ones(128, np.float16),
    }
)
LINES = b'event: line\ndata: {"position": 0, "sample": null}\n\ndata: {"summary": {}}\n\n'
Mutate = Callable[[bytes, Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """Bodies for one route."""

    method: str
    path: str
    """`{number}` becomes one more than the number of the case, `{session_id}` the id of an open session."""
    seed: bytes
    """A body that is right."""
    mutate: Mutate
    headers: Mapping[str, str] = field(default_factory=dict)


def compressed(pack: Callable[[bytes], bytes]) -> Mutate:
    """Mutates the packed bytes, or packs mutated ones."""
    return lambda body, draw: mutated_bytes(pack(body), draw) if draw.random() < 0.5 else pack(mutated_json(body, draw))


def posted(body: bytes, mutate: Mutate, path: str = "rollout", method: str = "POST", **headers: str) -> Target:
    """Args: `headers` have underscores for their dashes."""
    return Target(method, f"/v1/{path}", body, mutate, {name.replace("_", "-"): text for name, text in headers.items()})


def as_json(body: Mapping[str, Any], path: str, method: str = "POST", **headers: str) -> Target:
    return posted(json.dumps(body).encode(), mutated_json, path, method, content_type=JSON, **headers)


NDJSON = "application/x-ndjson"
VERSION, PUT = "policy/versions/{number}", "PUT"
MEETING = {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}
GZIP, ZSTD = compressed(partial(gzip.compress, mtime=0)), compressed(zstandard.ZstdCompressor().compress)
TARGETS: Mapping[str, Target] = {
    "JSON of POST /rollout": as_json(REQUEST, "rollout"),
    "JSON of POST /rollout, streamed": as_json(REQUEST, "rollout", accept=NDJSON),
    "JSON of POST /rollout, answered in Arrow": as_json(REQUEST, "rollout", accept=ARROW),
    "gzip of POST /rollout": posted(ROLLOUT, GZIP, content_type=JSON, content_encoding="gzip"),
    "zstd of POST /rollout": posted(ROLLOUT, ZSTD, content_type=JSON, content_encoding="zstd"),
    "JSON of POST /jobs": as_json(REQUEST, "jobs"),
    "JSON of POST /score": as_json(SCORE, "score"),
    "safetensors of PUT /policy/versions": posted(WEIGHTS, mutated_safetensors, VERSION, PUT, content_type=SAFETENSORS),
    **{
        f"{form} of POST /blobs": posted(picture("red", form, (9, 9)), mutated_bytes, "blobs")
        for form in ("PNG", "JPEG")
    },
    "JSON of PUT /policy/versions": as_json({"checkpoint": "/data/step-5"}, VERSION, PUT),
    "JSON of POST /policy/rollback": as_json({"to": 1, "version": 3}, "policy/rollback"),
    "JSON of POST /policy/transfer/init": as_json({"init_info": MEETING}, "policy/transfer/init"),
    "server-sent events of POST /rollout": posted(LINES, mutated_lines, content_type="text/event-stream"),
    "NDJSON of POST /rollout": posted(ROLLOUT + b"\n" + ROLLOUT, mutated_lines, content_type=NDJSON),
}


def fuzz_bodies(target: Target, cases: int, seed: int, service: FuzzedService) -> tuple[int, list[str]]:
    """Sends so many mutated bodies, `AT_ONCE` at a time."""
    return cases, asyncio.run(post_bodies(in_a_session(service, target), cases, seed, service))


def in_a_session(service: FuzzedService, target: Target) -> Target:
    """The target with an open session of its own, and with the key that the route takes; others as they are."""
    if SESSION not in target.path:
        return target
    opened = httpx.post(f"{service.url}/v1/sessions", json=LONG, headers=service.headers, timeout=ANSWER_TIMEOUT_S)
    session = opened.raise_for_status().json()
    key = {"authorization": f"Bearer {session['api_key']}"} if f"{SESSION}/v1/" in target.path else {}
    return replace(target, path=target.path.replace(SESSION, session["id"]), headers={**target.headers, **key})


async def post_bodies(target: Target, cases: int, seed: int, service: FuzzedService) -> list[str]:
    problems: list[str] = []
    numbers = iter(range(cases))
    timeout = aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(service.url, headers=service.headers, timeout=timeout) as session:

        async def post_one_after_the_other() -> None:
            for number in numbers:
                body = target.mutate(target.seed, Random(f"{seed} {number}"))
                path = target.path.format(number=number + 1)
                try:
                    async with session.request(target.method, path, data=body, headers=target.headers) as answer:
                        problems.extend(answer_problems(answer.status, await answer.read(), body))
                except (aiohttp.ClientError, TimeoutError) as error:
                    problems.append(f"{type(error).__name__}: {error}; the body began with {body[:100]!r}")

        await asyncio.gather(*(post_one_after_the_other() for _ in range(AT_ONCE)))
    return problems
