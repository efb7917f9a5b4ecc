"""Events of gRPC reach a busy event loop together."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import grpc
import pytest
import uvloop
from grpc import aio

from deployments.upstream.ray_serve.grpc_wakeups import _handle_all, read_all_wakeups
from tests.paths import REPOSITORY

CALLS = 500
"""Each has several events; about 280 wake-ups fill a socket pair."""
MOST_ITERATIONS = 200
"""It takes 20, and 400 where each brings one event."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server with threads: one that shares the event loop would take one call in each iteration."""
    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"echo": grpc.unary_unary_rpc_method_handler(lambda request, _context: request)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


async def iterations_of_calls(port: int, is_patched: bool = True) -> int:
    """How many iterations of a busy event loop it takes until all calls have their answers."""
    if is_patched:
        read_all_wakeups()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/test.Echo/echo")
        await echo(b"first")
        calls = [asyncio.ensure_future(echo(b"%d" % number)) for number in range(CALLS)]
        iterations = 0
        while not all(call.done() for call in calls):
            iterations += 1
            be_busy()
            await asyncio.sleep(0)
    assert [call.result() for call in calls] == [b"%d" % number for number in range(CALLS)]
    return iterations


def be_busy() -> None:
    """So long that gRPC's threads do meanwhile what they can."""
    time.sleep(0.02)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_events_of_many_calls_take_few_iterations(port: int, run: Callable[[Coroutine[Any, Any, int]], int]) -> None:
    assert run(iterations_of_calls(port)) < MOST_ITERATIONS


@pytest.mark.slow
@pytest.mark.long
def test_wakeups_must_still_be_read_together(port: int) -> None:
    """In a process of its own: the loops of one share the wake-ups, and any other of this one may be patched."""
    program = (
        f"import asyncio; from {__name__} import iterations_of_calls; "
        f"print(asyncio.run(iterations_of_calls({port}, is_patched=False)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    )
    assert int(ended.stdout) > MOST_ITERATIONS, "gRPC does it by itself: drop the patch"


def test_a_wakeup_that_another_loop_has_read_is_no_failure() -> None:
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        _handle_all(read, lambda: pytest.fail("There is nothing to handle."))


def test_two_loops_never_read_at_once() -> None:
    read, write = socket.socketpair()
    entered, leave = threading.Event(), threading.Event()

    def handle_slowly() -> None:
        entered.set()
        leave.wait()
        read.recv(1)

    with read, write, ThreadPoolExecutor(2) as threads:
        read.setblocking(False)
        write.send(b"11")
        first = threads.submit(_handle_all, read, handle_slowly)
        entered.wait()
        second = threads.submit(_handle_all, read, lambda: pytest.fail("The first loop has taken all events."))
        assert wait([second], timeout=0.2).not_done == {second}
        leave.set()
        first.result()
        second.result()
