"""Mutated bodies against the routes that read them: JSON, Arrow, safetensors, images, and streams that none reads."""

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import numpy as np
import zstandard
from safetensors.numpy import save

from rollout_client.arrow.schema import ARROW
from rollout_client.contract.policy import SAFETENSORS
from tests.deployments.images.pictures import picture
from tests.endurance.fuzz.answers import answer_problems
from tests.endurance.fuzz.mutation import mutated_bytes, mutated_json, mutated_lines, mutated_safetensors
from tests.endurance.fuzz.tally import Tally

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
OPTIONS = {
    "num_generations": 2,
    "sampling": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "stop_strings": ["!"]},
    "max_rollout_turns": 2,
    "deadline_s": 20.0,
    "policy": {"min_version": 0},
    "keep": {"per_group": 1},
}
ROLLOUT = json.dumps({"samples": SAMPLES, **OPTIONS}).encode()
SCORE = json.dumps({"sequences": [{"token_ids": [49, 50, 51, 52], "start": 1}], "top_k": 2}).encode()
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
    """`{number}` becomes one more than the number of the case, `{session_id}` the session's id. The cases of a path are
    the same in each run, whatever session there is."""
    seed: bytes
    """A body that is right."""
    mutate: Mutate
    headers: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""


def compressed(pack: Callable[[bytes], bytes]) -> Mutate:
    """Mutates the packed bytes, or packs mutated ones."""

    def mutate(body: bytes, draw: Random) -> bytes:
        if draw.random() < 0.5:
            return mutated_bytes(pack(body), draw)
        return pack(mutated_json(body, draw))

    return mutate


def gzip_packed(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


TARGETS: Mapping[str, Target] = {
    "JSON of POST /rollout": Target("POST", "/v1/rollout", ROLLOUT, mutated_json, {"content-type": JSON}),
    "JSON of POST /rollout, streamed": Target(
        "POST", "/v1/rollout", ROLLOUT, mutated_json, {"content-type": JSON, "accept": "application/x-ndjson"}
    ),
    "JSON of POST /rollout, answered in Arrow": Target(
        "POST", "/v1/rollout", ROLLOUT, mutated_json, {"content-type": JSON, "accept": ARROW}
    ),
    "gzip of POST /rollout": Target(
        "POST", "/v1/rollout", ROLLOUT, compressed(gzip_packed), {"content-type": JSON, "content-encoding": "gzip"}
    ),
    "zstd of POST /rollout": Target(
        "POST",
        "/v1/rollout",
        ROLLOUT,
        compressed(zstandard.ZstdCompressor().compress),
        {"content-type": JSON, "content-encoding": "zstd"},
    ),
    "JSON of POST /jobs": Target("POST", "/v1/jobs", ROLLOUT, mutated_json, {"content-type": JSON}),
    "JSON of POST /score": Target("POST", "/v1/score", SCORE, mutated_json, {"content-type": JSON}),
    "safetensors of PUT /policy/versions": Target(
        "PUT", "/v1/policy/versions/{number}", WEIGHTS, mutated_safetensors, {"content-type": SAFETENSORS}
    ),
    **{
        f"{form} of POST /blobs": Target("POST", "/v1/blobs", picture("red", form, (9, 9)), mutated_bytes)
        for form in ("PNG", "JPEG")
    },
    "JSON of PUT /policy/versions": Target(
        "PUT", "/v1/policy/versions/{number}", b'{"checkpoint": "/data/step-5"}', mutated_json, {"content-type": JSON}
    ),
    "JSON of POST /policy/rollback": Target(
        "POST", "/v1/policy/rollback", b'{"to": 1, "version": 3}', mutated_json, {"content-type": JSON}
    ),
    "JSON of POST /policy/transfer/init": Target(
        "POST",
        "/v1/policy/transfer/init",
        b'{"init_info": {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}}',
        mutated_json,
        {"content-type": JSON},
    ),
    "server-sent events of POST /rollout": Target(
        "POST", "/v1/rollout", LINES, mutated_lines, {"content-type": "text/event-stream"}
    ),
    "NDJSON of POST /rollout": Target(
        "POST", "/v1/rollout", ROLLOUT + b"\n" + ROLLOUT, mutated_lines, {"content-type": "application/x-ndjson"}
    ),
}


def fuzz_bodies(url: str, target: Target, cases: range, seed: int, headers: Mapping[str, str]) -> Tally:
    """Posts the mutated bodies with these numbers, `AT_ONCE` at a time."""
    return asyncio.run(post_bodies(url, target, cases, seed, headers))


async def post_bodies(url: str, target: Target, cases: range, seed: int, headers: Mapping[str, str]) -> Tally:
    tally = Tally()
    numbers = iter(cases)
    timeout = aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:

        async def post_one_after_the_other() -> None:
            for number in numbers:
                body = target.mutate(target.seed, Random(f"{seed} {target.path} {number}"))
                tally.add(Tally(1, await problems_of(session, target, number, body)))

        await asyncio.gather(*(post_one_after_the_other() for _ in range(AT_ONCE)))
    return tally


async def problems_of(session: aiohttp.ClientSession, target: Target, number: int, body: bytes) -> list[str]:
    path = target.path.format(number=number + 1, session_id=target.session_id)
    try:
        async with session.request(target.method, path, data=body, headers=target.headers) as answer:
            return list(answer_problems(answer.status, await answer.read(), body))
    except (aiohttp.ClientError, TimeoutError) as error:
        return [f"{type(error).__name__}: {error}; the body began with {body[:100]!r}"]
