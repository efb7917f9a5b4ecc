"""Batches of generations on one replica: the results as they finish, and the abortion of single generations."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import pytest

from deployments.failures import (
    GenerationLost,
    GenerationNotFinite,
    GenerationRejected,
    ReplicaShuttingDown,
    RolloutFailure,
)
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.generation.health import MOST_NOT_FINITE, ReplicaUnusable
from deployments.protocols.generation import Engine, Generation, GenerationRequest, GenerationResults, SamplingOptions
from deployments.protocols.model_server import ServedPart, ServedParts, ServedRequest, ServedTokens
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from deployments.rpc import liveness
from deployments.rpc.batching import MOST_BYTES_PER_MESSAGE
from tests import virtual_time

DONE = Generation([1], [0.0], "stop")
DESCRIPTION = GeneratorDescription("scripted", max_model_len=10, vocab_size=2)
LOAD = ReplicaLoad(7, 3, 1000)
RAISED: dict[str, BaseException] = {
    "rejected": GenerationRejected("too long"),
    "bug": KeyError("bug"),
    "not finite": GenerationNotFinite("nan"),
}


class Panic(BaseException):
    """What a library in Rust raises when it panics: no `Exception`."""


class ScriptedEngine(Engine):
    """Finishes a generation when `finish` names it; those whose name is in `RAISED` fail at once."""

    def __init__(self) -> None:
        self._finishing: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.interrupted: list[tuple[list[str], RolloutFailure | None]] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        name = request.generation_id
        self.started.append(name)
        if name == "panic":
            raise Panic
        if name in RAISED:
            raise RAISED[name]
        try:
            await self._finishing.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return DONE

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        self.interrupted.append((list(generation_ids), failure))

    def finish(self, *names: str) -> None:
        for name in names:
            self._finishing[name].set()

    def describe(self) -> GeneratorDescription:
        return DESCRIPTION

    def load(self) -> ReplicaLoad:
        return LOAD


class ScriptedReplica(GeneratorReplicaBase):
    """Its weights are of version 3."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        super().__init__(self.engine)

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        if request.min_weight_version > 3:
            raise GenerationLost("not yet")


def requests(*names: str, **fields: Any) -> list[GenerationRequest]:
    of_all = {"rollout_id": "rollout", "request_id": "r", **fields}
    return [GenerationRequest(name, [1], 1, (), SamplingOptions(), **of_all) for name in names]


@virtual_time.synchronous
async def results_of(replica: ScriptedReplica, requests: list[GenerationRequest]) -> list[Generation | RolloutFailure]:
    """The results in the order of the requests."""
    by_place = {place: result async for item in replica.generate(requests) for place, result in item.results}
    return [by_place[place] for place in sorted(by_place)]


def test_a_failure_is_the_result_of_its_own_generation_alone(caplog: pytest.LogCaptureFixture) -> None:
    rejected, bug, panic = results_of(ScriptedReplica(), requests("rejected", "bug", "panic"))
    assert rejected is RAISED["rejected"]
    # Classes that may not exist where the result is unpickled are replaced.
    assert (type(bug), str(bug)) == (RolloutFailure, "KeyError: 'bug'")
    assert (type(panic), str(panic)) == (RolloutFailure, "Panic was raised.")
    logged = {record.exc_info[0]: record for record in caplog.records if record.exc_info}
    assert logged.keys() == {KeyError, Panic}, "those without a name of ours, with their tracebacks"
    names = ("request_id", "rollout_id", "generation_id")
    assert [vars(logged[KeyError])[name] for name in names] == ["r", "rollout", "bug"]


def of_groups(name: str, count: int) -> list[GenerationRequest]:
    return [request for number in range(count) for request in requests(name, group=f"group {number}")]


async def test_a_replica_that_keeps_generating_nan_is_unhealthy() -> None:
    replica = ScriptedReplica()
    for request in of_groups("rejected", 2 * MOST_NOT_FINITE):
        await anext(replica.generate([request]))
    for request in of_groups("not finite", MOST_NOT_FINITE - 1):
        [(_, result)] = (await anext(replica.generate([request]))).results
        assert result is RAISED["not finite"]
    await replica.check_health()
    await anext(replica.generate(of_groups("not finite", 1)))
    with pytest.raises(ReplicaUnusable, match=r"^16 of the last 16 generations had log-prob"):
        await replica.check_health()


async def test_a_replica_out_of_service_refuses_generations_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    replica = ScriptedReplica()
    await replica.check_health()
    await replica.take_out_of_service("it differs")
    await replica.take_out_of_service("another reason")
    with pytest.raises(ReplicaUnusable, match=r"^The replica was taken out of service: it differs\.$"):
        await replica.check_health()
    [(_, refused)] = (await anext(replica.generate(requests("a")))).results
    assert type(refused) is GenerationLost
    assert str(refused) == "The generator replica was taken out of service; it is being replaced."
    assert replica.engine.started == []
    assert [record.getMessage() for record in caplog.records] == ["The replica is out of service: it differs."]


def test_a_replica_refuses_generations_that_need_newer_weights() -> None:
    replica = ScriptedReplica()
    [refused] = results_of(replica, requests("bug", min_weight_version=4))
    assert isinstance(refused, GenerationLost)
    assert replica.engine.started == []
    results_of(replica, requests("bug", min_weight_version=3))
    assert replica.engine.started == ["bug"]


async def test_an_aborted_generation_is_lost_and_the_others_of_its_batch_go_on() -> None:
    replica = ScriptedReplica()
    async with aclosing(replica.generate(requests("a", "b"))) as batches:
        first = asyncio.ensure_future(anext(batches))
        await virtual_time.settled()
        await replica.abort(["a", "unknown"])
        [(place, aborted)] = (await first).results
        assert (place, type(aborted), str(aborted)) == (0, GenerationLost, "The generation was aborted.")
        assert replica.engine.cancelled == ["a"]
        replica.engine.finish("b")
        assert (await anext(batches)).results == [(1, DONE)]


async def test_aborting_a_generation_aborts_its_retry_and_not_the_ended_try() -> None:
    replica = ScriptedReplica()
    async with aclosing(replica.generate(requests("a"))) as tried, aclosing(replica.generate(requests("a"))) as again:
        first, second = asyncio.ensure_future(anext(tried)), asyncio.ensure_future(anext(again))
        await virtual_time.settled()
        await virtual_time.end_by_cancellation(first)
        await tried.aclose()
        await virtual_time.settled()
        assert replica.engine.cancelled == ["a"]
        await replica.abort(["a"])
        [(_, aborted)] = (await second).results
        assert isinstance(aborted, GenerationLost)
        assert replica.engine.cancelled == ["a", "a"]


async def test_a_caller_that_waits_gets_the_load_each_second_without_results() -> None:
    replica = ScriptedReplica()
    async with aclosing(replica.generate(requests("a"), "ingress")) as items:
        for second in (1, 2, 3):
            assert await anext(items) == GenerationResults([], LOAD)
            assert virtual_time.now() == second
        replica.engine.finish("a")
        assert (await anext(items)).results == [(0, DONE)]


class ServingReplica(ScriptedReplica):
    """Answers each call in two parts, the second one when it is told to. A call named "bug" breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.left: list[str] = []

    async def answer_call(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        try:
            yield BEGUN
            if request.generation_id in RAISED:
                raise RAISED[request.generation_id]
            await self.may_end.wait()
            yield ENDED
        except asyncio.CancelledError:
            self.left.append(request.generation_id)
            raise


BEGUN = ServedPart(b"{", 200, "application/json")
ENDED = ServedPart(b"}", tokens=ServedTokens(3, 2))


def served(name: str) -> ServedRequest:
    return ServedRequest(name, [1], 1, (), SamplingOptions())


async def all_of(items: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in items]


async def answered(replica: ServingReplica, *names: str) -> list[ServedParts]:
    return [item async for item in replica.serve([served(name) for name in names], "ingress")]


async def test_parts_of_one_iteration_are_yielded_together() -> None:
    replica = ServingReplica()
    async with aclosing(replica.serve([served("a"), served("b")], "ingress")) as items:
        first = await anext(items)
        assert (first.parts, first.results) == ([("a", BEGUN), ("b", BEGUN)], [])
        replica.may_end.set()
        last = await anext(items)
        assert last.parts == [("a", ENDED), ("b", ENDED)]
        assert last.results == [(0, ServedTokens(3, 2)), (1, ServedTokens(3, 2))]
        assert await anext(items, None) is None
    assert await replica.ended_generations() == 2


def test_parts_that_are_large_together_are_divided() -> None:
    class LargeReplica(ServingReplica):
        async def answer_call(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
            yield ServedPart(bytes(MOST_BYTES_PER_MESSAGE - 1000), 200, tokens=ServedTokens(1, 1))

    items = virtual_time.run(answered(LargeReplica(), "a", "b"))
    assert [[name for name, _ in item.parts] for item in items] == [["a"], ["b"]]
    assert [[place for place, _ in item.results] for item in items] == [[], [0, 1]]


async def test_the_failure_of_a_call_is_its_own_alone_and_comes_after_its_parts() -> None:
    replica = ServingReplica()
    replica.may_end.set()
    items = await answered(replica, "bug", "a", "rejected")
    parts = [part for item in items for part in item.parts]
    results = dict(result for item in items for result in item.results)
    expected = [("a", BEGUN), ("a", ENDED), ("bug", BEGUN), ("rejected", BEGUN)]
    assert sorted(parts, key=lambda part: part[0]) == expected
    assert (type(results[0]), str(results[0])) == (RolloutFailure, "KeyError: 'bug'")
    assert (results[1], results[2]) == (ServedTokens(3, 2), RAISED["rejected"])
    assert await replica.ended_generations() == 1


async def test_a_replica_that_drains_hands_over_what_runs_until_all_have_ended() -> None:
    replica = ServingReplica()
    async with aclosing(replica.generate(requests("ends", "a"))) as items:
        first = asyncio.ensure_future(anext(items))
        call = asyncio.create_task(answered(replica, "c"))
        await virtual_time.settled()
        replica.drain(bound_s=10)
        replica.engine.finish("ends")
        assert (await first).results == [(0, DONE)]
        refused = [*await all_of(replica.generate(requests("new"))), *await answered(replica, "new")]
        refusals = [result for item in refused for _, result in item.results]
        said = (ReplicaShuttingDown, "The generator replica is being shut down.")
        assert [(type(refusal), str(refusal)) for refusal in refusals] == [said] * 2
        assert replica.engine.started == ["ends", "a"]
        await asyncio.sleep(9.9)
        assert replica.engine.interrupted == []
        await asyncio.sleep(0.7)
        handed_over = [(names, type(failure)) for names, failure in replica.engine.interrupted]
        assert handed_over == [(["a", "c"], ReplicaShuttingDown)] * 2
        replica.engine.finish("a")
        replica.may_end.set()
        assert [result for item in await all_of(items) for result in item.results] == [(1, DONE)]
    await call
    await asyncio.sleep(10)
    assert len(replica.engine.interrupted) == 2


async def test_what_a_dead_caller_has_under_way_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = ServingReplica()
    dead = set[str]()
    monkeypatch.setattr(liveness, "has_died", dead.__contains__)
    names = [f"SERVE_REPLICA::rollout#Ingress#{number}" for number in range(2)]
    batches = [replica.generate(requests(f"generation{number}"), name) for number, name in enumerate(names)]
    calls = [replica.serve([served(f"call{number}")], name) for number, name in enumerate(names)]
    begun = [asyncio.create_task(all_of(one)) for one in (*batches, *calls)]
    await asyncio.sleep(50)
    assert (replica.engine.cancelled, replica.left) == ([], [])
    dead.add(names[1])
    await asyncio.sleep(2 * liveness.POLL_S)
    assert (replica.engine.cancelled, replica.left) == (["generation1"], ["call1"])
    replica.may_end.set()
    replica.engine.finish("generation0")
    await asyncio.gather(*begun)


async def test_a_replica_reports_its_callers_and_the_highest_ended_virtual_time() -> None:
    replica = ScriptedReplica()
    callers = (("one", 7), ("two", 50), ("three", 3))
    calls = [replica.generate(requests(caller, virtual_time=time), caller) for caller, time in callers]
    waiting = [asyncio.create_task(anext(call)) for call in calls]
    await virtual_time.settled()
    replica.engine.finish("one")
    [first, _, third] = waiting
    load = (await first).load
    assert (load.ongoing_generations, load.ingresses, load.virtual_time) == (LOAD.ongoing_generations, 3, 7)
    replica.engine.finish("three")
    assert (await third).load.virtual_time == 7
    assert await replica.ended_generations() == 2
    for task in waiting:
        task.cancel()


async def test_what_waits_in_the_ingress_counts_for_autoscaling() -> None:
    replica = ServingReplica()
    first, last = replica.generate(requests("a"), "one", 100), replica.generate(requests("c"), "other", 5)
    calling = replica.serve([served("b")], "one", 70)
    reading = [asyncio.create_task(all_of(stream)) for stream in (first, calling, last)]
    seen = []
    for ends in (None, *reading):
        if ends is not None:
            ends.cancel()
        await virtual_time.settled()
        seen.append((replica.load().ingresses, await replica.record_autoscaling_stats()))
    assert seen == [*[(2, {"in_progress": 7.0 + 70 + 5})] * 2, (1, {"in_progress": 7.0 + 5}), (0, {"in_progress": 7.0})]
    assert (await replica.describe(), await replica.ongoing_generations()) == (DESCRIPTION, 7)
