"""Requests of one event-loop iteration in one call: results, failures, cancellation. In virtual time."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from grpc import RpcError
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from deployments.failures import EnvironmentLost
from deployments.rpc.batching import MOST_BYTES_PER_MESSAGE, MOST_ITEMS_PER_MESSAGE, CallBatcher
from service.remote.replica_stream import control_calls, streamed_calls
from tests import virtual_time
from tests.fakes.serve_handle import ScriptedCall, ScriptedResponse


def stream_of(start_call: Callable[[list[str]], Any], **further: Any) -> CallBatcher[str, str]:
    return streamed_calls(start_call, EnvironmentLost, "The replica", **further)


class ScriptedReplica:
    """Its calls have the batches of the script, or are refused with its exceptions; it remembers what reached it."""

    def __init__(self, *script: Any, abort_result: Any = None) -> None:
        self._script = list(script)
        self._abort_result = abort_result
        self.requests: list[list[str]] = []
        self.calls: list[ScriptedCall] = []
        self.aborted: list[list[str]] = []
        self.refuses_aborts = False

    def start_call(self, requests: list[str]) -> ScriptedCall:
        self.requests.append(requests)
        batches = self._script.pop(0)
        if isinstance(batches, Exception):
            raise batches
        self.calls.append(ScriptedCall(batches))
        return self.calls[-1]

    def abort(self, requests: list[str]) -> ScriptedResponse:
        self.aborted.append(requests)
        if self.refuses_aborts:
            raise RayServeException("no replicas")
        return ScriptedResponse(self._abort_result)

    def batcher(self) -> CallBatcher[str, str]:
        log_fields = {"replica_id": "r"}
        abort: CallBatcher[str, None] = control_calls(self.abort, "aborted", EnvironmentLost, "The replica", log_fields)
        return stream_of(self.start_call, log_fields=log_fields, abandon=abort.add)


@virtual_time.synchronous
async def call_all(replica: ScriptedReplica, *names: str) -> list[str | BaseException]:
    """The results of calls that are made in one event-loop iteration."""
    return await asyncio.gather(*map(replica.batcher().call, names), return_exceptions=True)


@virtual_time.synchronous
async def hang_up(replica: ScriptedReplica, names: Sequence[str], *, on: Sequence[str], after_s: float = 0.5) -> None:
    """Makes the calls, cancels those in `on` after a while, and waits for the others."""
    batcher = replica.batcher()
    calls = {name: asyncio.create_task(batcher.call(name)) for name in names}
    await asyncio.sleep(after_s)
    for name in on:
        calls[name].cancel()
    await asyncio.gather(*calls.values(), return_exceptions=True)
    await asyncio.sleep(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("most_iterations", "sent"),
    [
        (1, [["a", "b"], ["c"], ["d"], ["e"]]),
        (2, [["a", "b", "c"], ["d"], ["e"]]),
        (None, [["a", "b", "c", "d"], ["e"]]),
    ],
)
async def test_consecutive_iterations_go_in_one_call(most_iterations: int | None, sent: list[list[str]]) -> None:
    replica = ScriptedReplica([], [], [], [])

    batcher = stream_of(replica.start_call, most_iterations=most_iterations)
    calls = list[asyncio.Task[str]]()
    # By iteration of the event loop.
    for names in ("ab", "c", "d", "", "", "e"):
        calls += (asyncio.create_task(batcher.call(name)) for name in names)
        await asyncio.sleep(0)
    await asyncio.gather(*calls, return_exceptions=True)
    assert replica.requests == sent


async def test_a_batch_above_the_bound_of_a_message_is_divided() -> None:
    replica = ScriptedReplica([[(0, "A"), (1, "B")]], [[(0, "C")]], [[(1, "E")], [(0, "D")]])
    half = MOST_BYTES_PER_MESSAGE // 2
    sizes = {"a": half, "b": half, "c": 10 * half, "d": 1, "e": 1}
    batcher = stream_of(replica.start_call, bytes_of=sizes.__getitem__)
    assert await asyncio.gather(*map(batcher.call, sizes)) == ["A", "B", "C", "D", "E"]
    assert replica.requests == [["a", "b"], ["c"], ["d", "e"]]


async def test_other_work_runs_between_the_calls_of_a_divided_batch() -> None:
    replica = ScriptedReplica([[(0, "A")]], [[(0, "B")]], [[(0, "C")]])
    events: list[str] = []

    def start_call(requests: list[str]) -> ScriptedCall:
        events.append("call")
        asyncio.get_running_loop().call_soon(events.append, "other work")
        return replica.start_call(requests)

    batcher = stream_of(start_call, bytes_of=lambda _: MOST_BYTES_PER_MESSAGE)
    await asyncio.gather(*map(batcher.call, "abc"))
    assert events == ["call", "other work"] * 3


@pytest.mark.parametrize(
    ("most_requests", "sizes"),
    [(MOST_ITEMS_PER_MESSAGE, [MOST_ITEMS_PER_MESSAGE, 1]), (None, [MOST_ITEMS_PER_MESSAGE + 1])],
)
async def test_a_batch_of_too_many_requests_is_divided(most_requests: int | None, sizes: list[int]) -> None:
    replica = ScriptedReplica(*([[(place, "A") for place in range(size)]] for size in sizes))

    batcher = stream_of(replica.start_call, most_items=most_requests)
    assert await asyncio.gather(*(batcher.call(f"{number}") for number in range(sum(sizes)))) == ["A"] * sum(sizes)
    assert [len(requests) for requests in replica.requests] == sizes


async def test_a_result_is_given_before_the_rest_of_its_call_is_there() -> None:
    batcher = ScriptedReplica([[(1, "B")], [(0, "A")]]).batcher()
    ends: dict[str, float] = {}

    async def timed(name: str) -> None:
        await batcher.call(name)
        ends[name] = virtual_time.now()

    await asyncio.gather(timed("a"), timed("b"))
    assert ends == {"b": 1.0, "a": 2.0}


def test_a_call_that_breaks_fails_only_requests_without_a_result(caplog: pytest.LogCaptureFixture) -> None:
    lost, answered, also_lost = call_all(ScriptedReplica([[(1, "B")], ActorDiedError()]), "a", "b", "c")
    assert answered == "B"
    for failure in (lost, also_lost):
        assert isinstance(failure, EnvironmentLost)
        assert str(failure) == "The replica died during the call."
        assert isinstance(failure.__cause__, ActorDiedError)
    [record] = caplog.records
    message = "A call broke before 2 of its requests had a result: The replica died during the call."
    assert (record.levelname, record.getMessage(), record.exc_info) == ("WARNING", message, None)
    assert (vars(record)["replica_id"], vars(record)["cause"]) == ("r", "ActorDiedError()")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([], "The replica ended the call without an answer."),
        (RayServeException("no replicas"), "The replica could not be reached."),
        ([RpcError("too large")], "The replica could not be reached."),
    ],
)
def test_a_call_that_ends_early_or_cannot_be_made_is_a_lost_replica(script: Any, message: str) -> None:
    [failure] = call_all(ScriptedReplica(script), "a")
    assert isinstance(failure, EnvironmentLost)
    assert str(failure) == message
    assert failure.__cause__ is (script or [None] if isinstance(script, list) else [script])[0]


def test_a_call_whose_results_cannot_be_read_is_cancelled_and_raises_why() -> None:
    replica = ScriptedReplica([KeyError("no such class")])
    [broken] = call_all(replica, "a")
    assert isinstance(broken, KeyError)
    assert replica.calls[0].cancelled


@pytest.mark.parametrize("left", ["ab", "a"])
def test_a_call_of_which_nothing_is_waited_for_is_cancelled(left: str, caplog: pytest.LogCaptureFixture) -> None:
    replica = ScriptedReplica([[(1, "B")], [(0, "A")]])
    hang_up(replica, "ab", on=left)
    assert (replica.calls[0].cancelled, caplog.records) == (True, [])


def test_cancelled_requests_are_aborted_in_one_call() -> None:
    replica = ScriptedReplica([[(1, "B")], [(0, "A")], [(2, "C")]])
    hang_up(replica, "abc", on="ac")
    assert (replica.requests, replica.aborted) == ([["a", "b", "c"]], [["a", "c"]])


@pytest.mark.parametrize("refused", [True, False])
def test_an_abort_that_misses_its_replica_breaks_nothing(refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = ScriptedReplica([[(1, "B")], [(0, "A")]], abort_result=ActorDiedError())
    replica.refuses_aborts = refused
    hang_up(replica, "ab", on="a")
    why = "no replicas" if refused else "The replica died during the call."
    assert [(record.levelname, record.getMessage(), vars(record)["replica_id"]) for record in caplog.records] == [
        ("INFO", f"1 requests were not aborted: {why}", "r")
    ]


async def test_a_request_cancelled_before_it_was_sent_is_never_sent() -> None:
    replica = ScriptedReplica([[(0, "B")]])
    batcher = replica.batcher()
    hung_up = asyncio.create_task(batcher.call("a"))
    await asyncio.sleep(0)
    await virtual_time.end_by_cancellation(hung_up)
    await virtual_time.settled()
    assert replica.requests == []
    assert (await batcher.call("b"), replica.requests) == ("B", [["b"]])


async def test_a_call_is_made_in_the_context_of_no_request() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []
    replica = ScriptedReplica([[(0, "A")]])

    def start_call(requests: list[str]) -> ScriptedCall:
        seen.append(variable.get())
        return replica.start_call(requests)

    variable.set("a request")
    assert await stream_of(start_call).call("a") == "A"
    assert seen == ["none"]
