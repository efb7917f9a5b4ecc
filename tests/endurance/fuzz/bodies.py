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


def posted(body: bytes, mutate: Mutate, path: str = "rollout", method: str = "POST", **headers: str) -> Target:
    """Args: `headers` have underscores for their dashes."""
    return Target(method, f"/v1/{path}", body, mutate, {name.replace("_", "-"): text for name, text in headers.items()})


def as_json(body: bytes, path: str, method: str = "POST", **headers: str) -> Target:
    return posted(body, mutated_json, path, method, content_type=JSON, **headers)


NDJSON = "application/x-ndjson"
VERSION, PUT = "policy/versions/{number}", "PUT"
INIT = b'{"init_info": {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}}'
GZIP, ZSTD = compressed(gzip_packed), compressed(zstandard.ZstdCompressor().compress)
TARGETS: Mapping[str, Target] = {
    "JSON of POST /rollout": as_json(ROLLOUT, "rollout"),
    "JSON of POST /rollout, streamed": as_json(ROLLOUT, "rollout", accept=NDJSON),
    "JSON of POST /rollout, answered in Arrow": as_json(ROLLOUT, "rollout", accept=ARROW),
    "gzip of POST /rollout": posted(ROLLOUT, GZIP, content_type=JSON, content_encoding="gzip"),
    "zstd of POST /rollout": posted(ROLLOUT, ZSTD, content_type=JSON, content_encoding="zstd"),
    "JSON of POST /jobs": as_json(ROLLOUT, "jobs"),
    "JSON of POST /score": as_json(SCORE, "score"),
    "safetensors of PUT /policy/versions": posted(WEIGHTS, mutated_safetensors, VERSION, PUT, content_type=SAFETENSORS),
    **{
        f"{form} of POST /blobs": posted(picture("red", form, (9, 9)), mutated_bytes, "blobs")
        for form in ("PNG", "JPEG")
    },
    "JSON of PUT /policy/versions": as_json(b'{"checkpoint": "/data/step-5"}', VERSION, PUT),
    "JSON of POST /policy/rollback": as_json(b'{"to": 1, "version": 3}', "policy/rollback"),
    "JSON of POST /policy/transfer/init": as_json(INIT, "policy/transfer/init"),
    "server-sent events of POST /rollout": posted(LINES, mutated_lines, content_type="text/event-stream"),
    "NDJSON of POST /rollout": posted(ROLLOUT + b"\n" + ROLLOUT, mutated_lines, content_type=NDJSON),
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
