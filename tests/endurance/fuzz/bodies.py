"""Mutated bodies against the routes that read them: JSON, Arrow, safetensors, images, and streams that none reads."""

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import aiohttp
import numpy as np
import zstandard
from safetensors.numpy import save

from rollout_client.contract.policy import SAFETENSORS
from tests.deployments.images.pictures import picture
from tests.endurance.fuzz.answers import answer_problems
from tests.endurance.fuzz.fuzzed_service import FuzzedService
from tests.endurance.fuzz.mutation import mutated_bytes, mutated_lines, mutated_safetensors

JSON = "application/json"
AT_ONCE = 8
ANSWER_TIMEOUT_S = 60.0
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
WEIGHTS = save(
    {"model.embed_tokens.weight": np.zeros((262, 8), np.float16), "model.norm.weight": np.ones(128, np.float16)}
)
LINES = b'event: line\ndata: {"position": 0, "sample": null}\n\ndata: {"summary": {}}\n\n'
Mutate = Callable[[bytes, Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """Bodies for one route."""

    method: str
    path: str
    """`{number}` becomes one more than the number of the case."""
    seed: bytes
    """A body that is right."""
    mutate: Mutate
    headers: Mapping[str, str] = field(default_factory=dict)


def compressed(pack: Callable[[bytes], bytes]) -> Mutate:
    """Mutates the packed bytes, or packs mutated ones."""
    return lambda body, draw: (
        mutated_bytes(pack(body), draw) if draw.random() < 0.5 else pack(mutated_bytes(body, draw))
    )


def posted(body: bytes, mutate: Mutate, path: str = "rollout", method: str = "POST", **headers: str) -> Target:
    """Args: `headers` have underscores for their dashes."""
    return Target(method, f"/v1/{path}", body, mutate, {name.replace("_", "-"): text for name, text in headers.items()})


VERSION, PUT = "policy/versions/{number}", "PUT"
GZIP, ZSTD = compressed(partial(gzip.compress, mtime=0)), compressed(zstandard.ZstdCompressor().compress)
TARGETS: Mapping[str, Target] = {
    "gzip of POST /rollout": posted(ROLLOUT, GZIP, content_type=JSON, content_encoding="gzip"),
    "zstd of POST /rollout": posted(ROLLOUT, ZSTD, content_type=JSON, content_encoding="zstd"),
    "safetensors of PUT /policy/versions": posted(WEIGHTS, mutated_safetensors, VERSION, PUT, content_type=SAFETENSORS),
    "PNG of POST /blobs": posted(picture("red", "PNG", (9, 9)), mutated_bytes, "blobs"),
    "JPEG of POST /blobs": posted(picture("red", "JPEG", (9, 9)), mutated_bytes, "blobs"),
    "server-sent events of POST /rollout": posted(LINES, mutated_lines, content_type="text/event-stream"),
    "NDJSON of POST /rollout": posted(ROLLOUT + b"\n" + ROLLOUT, mutated_lines, content_type="application/x-ndjson"),
}


def fuzz_bodies(target: Target, cases: int, service: FuzzedService) -> tuple[int, list[str]]:
    """Sends so many mutated bodies, `AT_ONCE` at a time."""
    return cases, asyncio.run(post_bodies(target, cases, service))


async def post_bodies(target: Target, cases: int, service: FuzzedService) -> list[str]:
    problems: list[str] = []
    numbers = iter(range(cases))
    timeout = aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(service.url, headers=service.headers, timeout=timeout) as session:

        async def post_one_after_the_other() -> None:
            for number in numbers:
                body = target.mutate(target.seed, Random(number))
                path = target.path.format(number=number + 1)
                try:
                    async with session.request(target.method, path, data=body, headers=target.headers) as answer:
                        problems.extend(answer_problems(answer.status, await answer.read(), body))
                except (aiohttp.ClientError, TimeoutError) as error:
                    problems.append(f"{type(error).__name__}: {error}; the body began with {body[:100]!r}")

        await asyncio.gather(*(post_one_after_the_other() for _ in range(AT_ONCE)))
    return problems
