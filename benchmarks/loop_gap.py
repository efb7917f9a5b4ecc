"""The longest gap of the ingress's event loop under hostile and huge requests: a part of `python -m benchmarks scale`.

The real HTTP application runs in a process of its own, over a generator and an environment that cost nothing
(`benchmarks/loop_gap_server.py`). While each request is read, played and answered, a probe ticks on the event loop. The
gap that counts is in processor time of the event loop's thread; the wall time is reported beside it, and includes what
other threads and processes of the machine took. The memory is what the process held at most while it handled the
request, above what it held before. The last line is JSON.
"""

import asyncio
import gzip
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.loop_gap_server import TASK, serve
from benchmarks.process_group import no_process_left
from benchmarks.resident_memory import Peak, resident_kb
from rollout_client.arrow.schema import ARROW
from service.rollout_requests.result_encoding import NDJSON

MIB = 2**20
BOUND_MS = 50.0
BATCH = 8192
GZIP_BODY = {"content-encoding": "gzip"}
DISCONNECTED = 0
DISCONNECT_AFTER_S = 4.0
"""The rollouts of the request are being played then."""
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `body` makes its bytes; `accept` is the format of the answer."""

    name: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    accept: str = "application/json"
    status: int = 200
    """That of the answer; `DISCONNECTED` if the client goes before there is one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Gaps in milliseconds, and what was answered."""

    cpu_ms: float
    wall_ms: float
    status: int
    answer_bytes: int
    seconds: float
    memory_mb: float


PROMPT = "Add the numbers. " * 64


def sample(content: str = "What is 1 + 1?", **fields: Any) -> dict[str, Any]:
    return {"task_name": TASK, "messages": [{"role": "user", "content": content}], **fields}


def logged(token_ids: list[Any]) -> dict[str, Any]:
    return {"task_name": TASK, "message_log": [{"role": "user", "content": "", "token_ids": token_ids}]}


def request(samples: list[dict[str, Any]], new_tokens: int = 16, turns: int = 2, **options: Any) -> bytes:
    fields = {
        "samples": samples,
        "sampling": {"max_new_tokens": new_tokens},
        "max_rollout_turns": turns,
        **options,
    }
    return json.dumps(fields).encode()


def batch(count: int = BATCH, prompt_chars: int = 1024, **options: Any) -> Callable[[], bytes]:
    """An ordinary request."""
    return lambda: request([sample(PROMPT[:prompt_chars]) for _ in range(count)], **options)


def nested(levels: int) -> bytes:
    return request([sample(x="@")]).replace(b'"@"', b"[" * levels + b"]" * levels)


def echo_of_1_gb() -> bytes:
    return request([sample(x="y" * MIB)], turns=1, num_generations=1000)


def tokens_of_1_gb() -> bytes:
    """About 16 bytes of JSON for each token with its log-probability."""
    return request([sample()], new_tokens=2**16, turns=1, num_generations=1024)


def compressed_spaces(count: int) -> bytes:
    """Members of gzip, of 1 MiB each: compressing them one by one would take seconds."""
    return gzip.compress(b" " * MIB) * (count // MIB)


def many_objects(count: int) -> bytes:
    return request([sample(x="@")]).replace(b'"@"', b"[" + b",".join([b"{}"] * count) + b"]")


REFUSED = 422
CASES = (
    Case("wrong elements: 300,000", lambda: request([logged(["a"] * 300_000)]), status=REFUSED),
    Case(
        "unknown fields: 300,000",
        lambda: request([sample()], **{f"x{place}": 1 for place in range(300_000)}),
        status=REFUSED,
    ),
    Case("wrong samples: 100,000", lambda: request([{}] * 100_000), status=REFUSED),
    Case("JSON of 15 MB in one sample", lambda: many_objects(5_000_000), status=REFUSED),
    Case("token ids of 15 MB in one sample", lambda: request([logged([97] * 3_750_000)])),
    Case("nesting: 100,000 levels", lambda: nested(100_000), status=REFUSED),
    Case("prompts of 1 MB", lambda: request([sample("word " * 200_000)] * 2)),
    Case(
        "prompt of 2,048 messages", lambda: request([{**sample(), "messages": sample("word " * 8)["messages"] * 2048}])
    ),
    Case("observations of 10 MB", lambda: request([sample(extra_env_info={"observation_chars": 10 * MIB})] * 2)),
    Case(
        "stop strings: 100,000", lambda: request([sample()], sampling={"stop_strings": ["!"] * 100_000}), status=REFUSED
    ),
    Case("gzip of 1 GB", lambda: compressed_spaces(2**30), GZIP_BODY, status=413),
    Case("gzip of 250 MB", lambda: gzip.compress(request([sample()])) + compressed_spaces(250 * MIB), GZIP_BODY),
    Case("10,000 generations", lambda: request([sample(x="y" * 2**17)], num_generations=10_000), status=REFUSED),
    Case("1 GB of echoed fields, JSON", echo_of_1_gb),
    Case("1 GB of echoed fields, NDJSON", echo_of_1_gb, accept=NDJSON),
    Case("1 GB of echoed fields, Arrow", echo_of_1_gb, accept=ARROW),
    Case("1 GB of tokens, JSON", tokens_of_1_gb),
    Case("1 GB of tokens, NDJSON", tokens_of_1_gb, accept=NDJSON),
    Case("1 GB of tokens, Arrow", tokens_of_1_gb, accept=ARROW),
    Case("batch of 8,192, JSON", batch()),
    Case("batch of 8,192, NDJSON", batch(), accept=NDJSON),
    Case("batch of 8,192, Arrow", batch(), accept=ARROW),
    Case("batch of 8,192 in lockstep", batch(schedule="lockstep")),
    Case("deadline of a batch of 32,768", batch(32_768, prompt_chars=16, turns=100, deadline_s=2.0)),
    Case("disconnect from a batch of 32,768", batch(32_768, prompt_chars=16, turns=100), status=DISCONNECTED),
)
WARM_UP = (
    Case("small", batch(2)),
    Case("small, Arrow", batch(2), accept=ARROW),
    Case("large", batch(200)),
)
"""The first requests import and compile, which no other request does again."""


def main(
    only: Annotated[str, typer.Option(help="Measures the cases whose names contain this.")] = "",
) -> None:
    with no_process_left():
        measured = measure_all([case for case in CASES if only in case.name])
    report(measured)
    typer.echo(json.dumps(figures(measured)))


def measure_all(cases: Sequence[Case]) -> dict[str, Measured]:
    with serving() as (url, server):
        return asyncio.run(measure_at(url, server, cases))


@contextmanager
def serving() -> Iterator[tuple[str, psutil.Process]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,))
    server.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}", psutil.Process(server.pid)
    finally:
        server.terminate()
        server.join()


async def measure_at(url: str, server: psutil.Process, cases: Sequence[Case]) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    # The server ends connections that are idle while a body is made.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        for case in WARM_UP:
            await measure(session, server, case)
        for case in cases:
            with console.status(case.name):
                each = measured[case.name] = await measure(session, server, case)
            gap = f"{each.cpu_ms:.1f} ms in {each.seconds:.1f} s"
            console.print(f"{case.name}: {each.status}, {gap}, {each.memory_mb:,.0f} MB")
    return measured


async def measure(session: aiohttp.ClientSession, server: psutil.Process, case: Case) -> Measured:
    body = case.body()
    await (await session.post("/probe")).read()
    held_kb, peak = resident_kb(server), Peak(server)
    started_at = time.monotonic()
    async with peak:
        status, answer_bytes = await post(session, case, body)
    if status != case.status:
        raise RuntimeError(f"{case.name}: the status of the answer is {status} and not {case.status}.")
    seconds = time.monotonic() - started_at
    gaps = await (await session.get("/probe")).json()
    memory_mb = max(0.0, peak.kb - held_kb) / 1000
    return Measured(gaps["cpu_ms"], gaps["wall_ms"], status, answer_bytes, seconds, memory_mb)


async def post(session: aiohttp.ClientSession, case: Case, body: bytes) -> tuple[int, int]:
    """The status and the length of the answer, which is dropped as it comes."""
    headers = {"content-type": "application/json", **case.headers, "accept": case.accept}
    wait_s = DISCONNECT_AFTER_S if case.status == DISCONNECTED else None
    try:
        async with asyncio.timeout(wait_s), session.post("/rollout", data=body, headers=headers) as answer:
            return answer.status, sum([len(chunk) async for chunk in answer.content.iter_any()])
    except TimeoutError:
        # What the service does after the disconnect counts as well.
        await asyncio.sleep(DISCONNECT_AFTER_S)
        return DISCONNECTED, 0


def figures(measured: Mapping[str, Measured]) -> dict[str, float]:
    return {
        "loop_gap_cpu_ms": round(max(each.cpu_ms for each in measured.values()), 2),
        "loop_gap_wall_ms": round(max(each.wall_ms for each in measured.values()), 2),
    }


def report(measured: Mapping[str, Measured]) -> None:
    table = Table(
        *(
            "request",
            "status",
            "answer, MB",
            "seconds",
            "gap, ms of the loop's processor time",
            "wall, ms",
            "memory, MB",
        ),
        title=f"Longest gap of the ingress's event loop, at most {BOUND_MS:g} ms of its processor time",
    )
    for name, each in measured.items():
        size = f"{each.answer_bytes / 1e6:,.1f}"
        spent = (f"{each.seconds:.1f}", f"{each.cpu_ms:.1f}", f"{each.wall_ms:.1f}", f"{each.memory_mb:,.0f}")
        table.add_row(name, str(each.status), size, *spent)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
