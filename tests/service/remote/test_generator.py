"""Generations over a scripted Serve handle: which replica they go to, and how a retry moves on."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import GenerationLost, GenerationRejected, OtherVersionLoaded, Overloaded, TurnTimedOut
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    RequestShare,
    SamplingOptions,
    ScoringRequest,
)
from deployments.rpc.handle_calls import record_live_replicas
from service.remote.generator import RemoteGenerator
from service.scheduling.window import SUSPECT_AFTER
from tests import virtual_time
from tests.fakes.in_process_handle import InProcessResponse
from tests.fakes.serve_handle import ScriptedGeneratorHandle, ScriptedResponse
from tests.service.scripted import DESCRIPTION

DONE = Generation([1], [0.0], "stop")


def generator_over(
    *replicas: str, result: Any = DONE, window_factor: float | None = None
) -> tuple[ScriptedGeneratorHandle, RemoteGenerator]:
    handle: Any = ScriptedGeneratorHandle(result)
    record_live_replicas(handle.deployment_id, replicas)
    return handle, RemoteGenerator(handle, window_factor)


def request(name: str, rollout_id: str = "", group: str = "") -> GenerationRequest:
    return GenerationRequest(name, [1], 1, (), SamplingOptions(), rollout_id=rollout_id or name, group=group or name)


async def windowed(*replicas: str) -> tuple[ScriptedGeneratorHandle, RemoteGenerator]:
    """Two generations at a time on each replica."""
    handle, generator = generator_over(*replicas, window_factor=1.0)
    handle.describe.remote = lambda: ScriptedResponse(replace(DESCRIPTION, max_num_seqs=2))
    await generator.describe()
    return handle, generator


def begun(generator: RemoteGenerator, *names: str) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(generator.generate(request(name))) for name in names]


async def test_generations_beyond_the_window_wait_and_are_sent_when_others_end() -> None:
    handle, generator = await windowed("a")
    began = virtual_time.now()
    assert await asyncio.gather(*begun(generator, "one", "two", "three", "four", "five")) == [DONE] * 5
    assert virtual_time.now() - began == 3.0
    assert handle.generated == [("a", ["one", "two"]), ("a", ["three", "four"]), ("a", ["five"])]
    assert handle.waiting == [3, 1, 0], "each call tells how many wait"


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_one_that_ends_in_the_iteration_in_which_it_starts_is_not_sent(is_cancelled: bool) -> None:
    """It leaves its place to others."""
    handle, generator = await windowed("a")
    running = begun(generator, "one", "two", "three")
    await virtual_time.settled()
    handle.describe.remote = lambda: InProcessResponse(asyncio.sleep(0, replace(DESCRIPTION, max_num_seqs=3)))
    await generator.describe()
    assert generator.waiting_generations == 0
    assert running[2].cancel() if is_cancelled else generator.interrupt("three")
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.gather(*begun(generator, "four", "five", "six"))
    assert handle.generated == [("a", ["one", "two"]), ("a", ["four", "five", "six"])]


async def test_a_waiting_generation_that_is_cancelled_or_interrupted_is_not_sent() -> None:
    handle, generator = await windowed("a")
    began = virtual_time.now()
    running = begun(generator, "one", "two", "three", "left", "four")
    await virtual_time.settled()
    running[3].cancel()
    assert [generator.interrupt("three"), generator.interrupt("three")] == [True, True]
    assert await running[2] == Generation([], [], "abort")
    assert virtual_time.now() == began
    assert not generator.interrupt("three"), "it has ended"
    await asyncio.gather(*running, return_exceptions=True)
    assert handle.generated == [("a", ["one", "two"]), ("a", ["four"])]


async def test_waiting_generations_go_to_a_new_replica_as_soon_as_it_is_known() -> None:
    handle, generator = await windowed("a")
    began = virtual_time.now()
    running = begun(generator, *"0123")
    await asyncio.sleep(0.5)
    record_live_replicas(handle.deployment_id, ["a", "b"])
    await asyncio.gather(*running)
    assert virtual_time.now() - began < 2.0
    assert {replica: sorted(names) for replica, names in handle.generated} == {"a": ["0", "1"], "b": ["2", "3"]}


async def test_the_virtual_time_that_was_charged_is_sent_with_the_generation() -> None:
    handle, generator = await windowed("a")
    for name in ("one", "two", "three"):
        await generator.generate(replace(request(name), share=RequestShare("r", weight=0.5), prompt_token_ids=[]))
    assert [sent.virtual_time for sent in handle.requests] == [0, 2, 4]


async def test_before_any_replica_is_known_a_call_names_none() -> None:
    handle, generator = generator_over()
    first = await generator.generate(request("turn 0", rollout_id="one"))
    record_live_replicas(handle.deployment_id, ["a"])
    second = await generator.generate(request("turn 1", rollout_id="one"))
    assert (first.replica, second.replica) == ("", "a")
    assert handle.generated == [("", ["turn 0"]), ("a", ["turn 1"])]


STALLED = Generation([1], [0.0], "abort", failure=TurnTimedOut("no new token"))
CUT_BY_WEIGHTS = Generation([1], [0.0], "abort")


@pytest.mark.parametrize(
    ("result", "replicas"),
    [
        (GenerationLost("died"), {"a", "b"}),
        (Overloaded("full"), {"a", "b"}),
        (OtherVersionLoaded("It has version 4."), {"a", "b"}),
        (STALLED, {"a", "b"}),
        (GenerationRejected("too long"), {"a"}),
        (CUT_BY_WEIGHTS, {"a"}),
    ],
)
async def test_a_rollout_leaves_its_replica_when_that_failed_it_and_only_then(result: Any, replicas: set[str]) -> None:
    handle, generator = generator_over("a", result=result)
    for number in range(2):
        await asyncio.gather(generator.generate(request(f"try {number}", rollout_id="one")), return_exceptions=True)
        record_live_replicas(handle.deployment_id, ["a", "b"])
    assert {replica for replica, _ in handle.generated} == replicas


async def test_a_rollout_leaves_a_replica_of_another_version_not_as_suspect() -> None:
    handle, generator = generator_over("a", result=OtherVersionLoaded("It has version 4."))
    for number in range(2 * SUSPECT_AFTER):
        await asyncio.gather(generator.generate(request(f"{number}", f"rollout {number}")), return_exceptions=True)
    record_live_replicas(handle.deployment_id, ["a", "b"])
    pinned = [generator.generate(request(f"again {number}", f"rollout {number}")) for number in range(4)]
    await asyncio.gather(*pinned, return_exceptions=True)
    handle.generated.clear()
    await asyncio.gather(*begun(generator, "new 0", "new 1"), return_exceptions=True)
    assert {replica for replica, _ in handle.generated} == {"a", "b"}


async def test_a_rollout_generates_while_its_generation_is_at_a_replica() -> None:
    _, generator = await windowed("a")
    running = begun(generator, *"012")
    await virtual_time.settled()
    assert [generator.is_generating(name) for name in (*"012", "unknown")] == [True, True, False, False]
    await asyncio.gather(*running)
    assert [generator.is_generating(name) for name in "012"] == [False] * 3


async def test_interrupted_generations_are_named_in_one_call_for_a_replica() -> None:
    handle, generator = generator_over("a", result=CUT_BY_WEIGHTS)
    names = ("one", "two", "three")
    running = [asyncio.create_task(generator.generate(request(f"{name}-0", rollout_id=name))) for name in names]
    await asyncio.sleep(0.5)
    assert [generator.interrupt(name) for name in ("one", "two", "unknown")] == [True, True, False]
    assert await asyncio.gather(*running) == [CUT_BY_WEIGHTS] * 3
    assert [generator.interrupt(name) for name in names] == [False] * 3, "they have ended"
    assert handle.interrupted == [("a", ["one-0", "two-0"])]


async def test_a_generation_arrives_before_its_interruption() -> None:
    handle, generator = generator_over("a", result=CUT_BY_WEIGHTS)
    running = begun(generator, "one", "two")
    await asyncio.sleep(0)
    assert generator.interrupt("one")
    await asyncio.gather(*running, *begun(generator, "three"))
    assert handle.events[:2] == [("generate", ["one", "two"]), ("interrupt", ["one"])]
    assert sorted(handle.events[2:]) == [("generate", ["three"])]


async def test_a_cancelled_generation_is_aborted_on_its_own_replica() -> None:
    handle, generator = generator_over("a", result=None)
    one, two = begun(generator, "one", "two")
    await asyncio.sleep(1)
    two.cancel()
    await asyncio.sleep(1)
    assert handle.aborted == [("a", ["two"])]
    one.cancel()
    await asyncio.gather(one, two, return_exceptions=True)
    await virtual_time.settled()
    assert handle.calls[0].cancelled


def test_a_replica_that_dies_is_a_lost_generation_and_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    handle, generator = generator_over("a")
    handle.raised = ActorDiedError()
    with pytest.raises(GenerationLost, match=r"^The generator replica died during the call\.$"):
        virtual_time.run(generator.generate(request("one")))
    assert [vars(record)["replica_id"] for record in caplog.records] == ["a"]


async def test_scores_go_to_the_replica_that_is_named_in_turn_with_others() -> None:
    handle, generator = await windowed("a", "b")
    score = ScoringRequest("score", [1, 2], 1, (), SamplingOptions(), rollout_id="score", group="score")
    busy = begun(generator, *"01234567")
    await virtual_time.settled()
    assert await asyncio.gather(*(generator.score_on("b", score) for _ in range(3))) == [DONE] * 3
    await asyncio.gather(*busy)
    assert generator.replicas() == ("a", "b")
    places = [(replica, name) for replica, names in handle.generated for name in names]
    assert [replica for replica, name in places if name == "score"] == ["b"] * 3
    assert [name for _, name in places].index("score") < 8, "the first one does not wait for all others"
    assert [name for _, name in places[-2:]] == ["score"] * 2, "they share a sixteenth"
    assert generator.waiting_generations == 0


async def test_a_generation_for_a_replica_that_goes_is_sent_to_no_other() -> None:
    handle, generator = await windowed("a", "b")
    running = [asyncio.create_task(generator.generate_on("b", request(f"{number}"))) for number in range(3)]
    await virtual_time.settled()
    record_live_replicas(handle.deployment_id, ["a"])
    ends = await asyncio.gather(*running, generator.generate_on("b", request("later")), return_exceptions=True)
    assert ends[:2] == [DONE, DONE]
    message = "Generator replica b takes no calls: it has ended, or is replaced."
    assert [(type(end), str(end)) for end in ends[2:]] == [(GenerationLost, message)] * 2
    assert {replica for replica, _ in handle.generated} == {"b"}
    assert generator.waiting_generations == 0


@pytest.mark.parametrize(
    ("result", "logged"), [(None, []), (ActorDiedError(), ["The replica was not taken out of service"])]
)
async def test_a_replica_is_told_that_it_is_out_of_service(
    result: Exception | None, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handle, generator = generator_over("a", "b")
    handle.take_out_result = result
    generator.take_out_of_service("b", "it differs")
    await asyncio.sleep(2)
    assert handle.taken_out == [("b", "it differs")]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == logged
