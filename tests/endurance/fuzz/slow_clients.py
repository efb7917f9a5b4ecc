"""Slow senders and slow readers by the thousand, beside a client that must be answered all the time."""

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

import aiohttp

from tests.endurance.core_speed import core_speed
from tests.endurance.fuzz.answers import answer_problems
from tests.endurance.fuzz.bodies import ROLLOUT, SAMPLES
from tests.endurance.fuzz.fuzzed_service import FuzzedService

CLIENTS = 1000
SECONDS = 30.0
PAUSE_S = 1.0
"""Between two bytes of a slow client."""
ANSWERED_WITHIN_S = 20.0
"""A rollout of the client that is not slow, on cores of usual speed. It comes behind a thousand requests with large
answers, which are ten seconds of work."""
QUICK_PAUSE_S = 0.1
CONNECTED_AT_ONCE = 64
CONNECTED_WITHIN_S = 20.0
SMALL_BUFFER_BYTES = 4096
LARGE_SAMPLE = SAMPLES[0] | {"further": "y" * 2**17}
LARGE_ANSWER = json.dumps(
    {"samples": [LARGE_SAMPLE], "num_generations": 2, "sampling": {"max_new_tokens": 8}, "max_rollout_turns": 1}
).encode()
"""A request whose answer has 260 KB."""


@dataclass(frozen=True, slots=True)
class Slow:
    """What a slow client does until it goes away."""

    start: bytes
    """The first line of its request."""
    rest: bytes
    """What follows the headers that all requests have."""
    each_second: bytes
    """What it sends each second; empty if it reads a byte."""


POST = b"POST /v1/rollout HTTP/1.1\r\n"
SLOW_CLIENTS: Mapping[str, Slow] = {
    "slow senders of a body": Slow(POST, b"Content-Length: 100000\r\n\r\n", b" "),
    "slow senders of headers": Slow(b"GET /v1/info HTTP/1.1\r\n", b"X-Slow: ", b"a"),
    "slow readers": Slow(POST, b"Content-Length: %d\r\n\r\n" % len(LARGE_ANSWER) + LARGE_ANSWER, b""),
}


def fuzz_slowly(slow: Slow, service: FuzzedService) -> tuple[int, list[str]]:
    """`CLIENTS` slow ones, all for `SECONDS`; meanwhile another one posts rollouts and waits for each."""
    return CLIENTS, asyncio.run(slow_and_quick(service.url, slow, service.headers))


async def slow_and_quick(url: str, slow: Slow, headers: Mapping[str, str]) -> list[str]:
    until = monotonic() + SECONDS
    free = asyncio.Semaphore(CONNECTED_AT_ONCE)
    clients = [asyncio.create_task(one_slow_client(url, slow, headers, until, free)) for _ in range(CLIENTS)]
    problems = await quick_client_problems(url, headers, until)
    ended = await asyncio.gather(*clients, return_exceptions=True)
    # That the service ends their connections is its right. That it takes none at all is not.
    unconnected = sum(isinstance(each, ConnectionRefusedError) for each in ended)
    if unconnected:
        problems.append(f"{unconnected} of {CLIENTS} connections were refused")
    return problems


async def one_slow_client(
    url: str, slow: Slow, headers: Mapping[str, str], until: float, free: asyncio.Semaphore
) -> None:
    address = urlsplit(url)
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": address.netloc, **headers}.items()).encode()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        async with free, asyncio.timeout(CONNECTED_WITHIN_S):
            await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, slow.start + lines + slow.rest)
        while monotonic() < until:
            if slow.each_second:
                await loop.sock_sendall(connection, slow.each_second)
            else:
                async with asyncio.timeout_at(loop.time() + max(0.0, until - monotonic())):
                    await loop.sock_recv(connection, 1)
            await asyncio.sleep(PAUSE_S)


async def quick_client_problems(url: str, headers: Mapping[str, str], until: float) -> list[str]:
    problems: list[str] = []
    sent = {**headers, "content-type": "application/json"}
    timeout = aiohttp.ClientTimeout(ANSWERED_WITHIN_S / core_speed())
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        while monotonic() < until:
            try:
                async with session.post("/v1/rollout", data=ROLLOUT, headers=sent) as answer:
                    problems += answer_problems(answer.status, await answer.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                problems.append(f"beside slow clients: {type(error).__name__}: {error}")
            await asyncio.sleep(QUICK_PAUSE_S)
    return problems
