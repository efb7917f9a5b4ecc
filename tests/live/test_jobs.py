"""Two ingress replicas that share a job store: a request is played once, whichever replica is asked and whichever dies.

The engine is a simulated one, whose tokens depend on the prompt alone: what is played again comes to the same result.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from ray import serve

from deployments.jobs.records import JobRecord
from deployments.upstream.ray_serve.serve_internals import application_states
from rollout_client import RolloutClient
from rollout_client.contract.jobs import JobEvent
from rollout_client.contract.rollouts import RolloutResponse, SampleInput, SampleResult
from tests.live.following_environment import following
from tests.live.running_service import ended_generations as generations
from tests.live.running_service import replicas
from tests.live.services import REPLICAS as INGRESSES
from tests.live.services import SimulatedService

GROUPS = 8
LEAST_TURNS = 6
TURNS = sum(range(LEAST_TURNS, LEAST_TURNS + GROUPS))
"""Each group has one turn more than the one before it: they end one after the other."""
OPTIONS: dict[str, Any] = {"sampling": {"max_new_tokens": 4, "greedy": True}, "max_rollout_turns": 100}
UNTIL_S = 180.0
Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, all games but the two shortest wait in the turn after the end of these two."""
    return tmp_path_factory.mktemp("jobs") / "gate"


def samples(about: str, gate: Path) -> list[SampleInput]:
    """Whose games are unlike those of another `about`."""

    def turn_of(turn: int) -> dict[str, Any]:
        waits = {"while_there": str(gate)} if turn == LEAST_TURNS + 1 else {}
        return {"observation": f"{about} {turn}", "reward": turn + 1, **waits}

    return [
        SampleInput.model_validate(
            following(*(turn_of(turn) for turn in range(LEAST_TURNS + number)), id=f"{about}-{number}")
        )
        for number in range(GROUPS)
    ]


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + UNTIL_S
    while not holds():
        assert time.monotonic() < end, f"not within {UNTIL_S:g} s: {what}"
        time.sleep(0.02)


def newest_record() -> JobRecord:
    handle: Any = serve.get_deployment_handle("Jobs", app_name="rollout")
    record: JobRecord = handle.records.remote("admin").result()[0]
    return record


def player() -> psutil.Process:
    """The process of the ingress replica that plays the newest job."""
    _host, pid, _ = newest_record().owner.split(":")
    [process] = [process for process in replicas("Ingress") if process.pid == int(pid)]
    return process


def until_all_ingresses_are_there(client: RolloutClient) -> None:
    def are_there() -> bool:
        is_healthy = application_states()["rollout"].deployments["Ingress"].status == "HEALTHY"
        return is_healthy and len(replicas("Ingress")) == INGRESSES

    until(are_there, f"{INGRESSES} ingress replicas run")
    client.wait_until_ready(UNTIL_S)


def one_after_another(threads: ThreadPoolExecutor, call: Callable[[], Answer], count: int) -> "list[Future[Answer]]":
    """Calls of which each replica gets some.

    Serve gives each replica half of what is open, but a burst to the one whose queue it has asked for already.
    """
    calls: list[Future[Answer]] = []
    for _ in range(count):
        calls.append(threads.submit(call))
        time.sleep(0.2)
    return calls


def body_of(about: str, gate: Path) -> str:
    posted = [sample.model_dump(exclude_unset=True) for sample in samples(about, gate)]
    return json.dumps({"samples": posted, **OPTIONS})


def what_counts(sample: SampleResult) -> tuple[Any, ...]:
    """What does not say how long it took."""
    return sample.id, sample.status, sample.total_reward, sample.metrics, sample.message_log


def played_from(answer: dict[str, Any]) -> list[Any]:
    return list(map(what_counts, RolloutResponse.model_validate(answer).samples))


def test_a_request_at_both_replicas_is_played_once_also_if_one_is_killed(
    simulated: SimulatedService, simulated_client: RolloutClient, gate: Path
) -> None:
    body, http = body_of("a", gate), simulated.http()
    before = generations()
    undisturbed = http.post("/rollout", content=body).json()
    assert generations() - before == TURNS

    def post() -> httpx.Response | httpx.HTTPError:
        try:
            return http.post("/rollout", content=body, headers={"idempotency-key": '"step-1"'})
        except httpx.HTTPError as error:
            return error

    before = generations()
    gate.touch()
    with ThreadPoolExecutor(6) as threads:
        posted = one_after_another(threads, post, 6)
        until(lambda: generations() - before > TURNS / 4, "a fourth of the turns is played")
        player().kill()
        gate.unlink()
        answers = [each.result() for each in posted]
    whole = [answer for answer in answers if isinstance(answer, httpx.Response) and answer.status_code == 200]
    assert 0 < len(whole) < len(answers), "some waited at the replica that was killed, some at the other one"
    for answer in whole:
        assert answer.content == whole[0].content
    assert played_from(whole[0].json()) == played_from(undisturbed)
    assert generations() - before <= TURNS + GROUPS
    again = post()
    assert isinstance(again, httpx.Response)
    assert again.content == whole[0].content
    until_all_ingresses_are_there(simulated_client)


def test_a_broken_stream_of_events_goes_on_at_the_other_replica(
    simulated: SimulatedService, simulated_client: RolloutClient, gate: Path
) -> None:
    client, http = simulated_client, simulated.http()
    undisturbed = client.rollout(samples("b", gate), **OPTIONS)
    gate.touch()
    accepted = http.post("/jobs", content=body_of("b", gate))
    assert accepted.status_code == 202
    place = accepted.headers["location"]
    job_id = accepted.json()["job_id"]
    before = generations()

    def events_of_one_stream(after: int) -> list[JobEvent]:
        events: list[JobEvent] = []
        try:
            with http.stream("GET", f"{place}/events", params={"after": after}) as response:
                for line in filter(None, response.iter_lines()):
                    # One by one: those before a break count.
                    event = JobEvent.model_validate_json(line)
                    events.append(event)
        except httpx.HTTPError:
            return events
        return events

    with ThreadPoolExecutor(12) as threads:
        streams = one_after_another(threads, partial(events_of_one_stream, 0), 8)
        followed = [threads.submit(lambda: list(client.jobs.events(job_id))) for _ in range(4)]
        until(lambda: client.jobs.status(job_id).last_event >= 2, "two groups have ended")
        player().kill()
        gate.unlink()
        received = [stream.result() for stream in streams]
        by_client = [follow.result() for follow in followed]
    numbers = list(range(1, GROUPS + 2))
    broken = [events for events in received if [event.event for event in events] != numbers]
    assert 0 < len(broken) < len(received), "some were read from the replica that was killed, some from the other one"
    whole = by_client[0]
    assert [event.event for event in whole] == numbers
    assert by_client == [whole] * 4
    for events in broken:
        assert len(events) >= 2
        assert events + events_of_one_stream(events[-1].event) == whole
    rollouts = {each.position: each.sample for event in whole[:-1] for each in event.samples}
    assert [what_counts(rollouts[position]) for position in range(GROUPS)] == [
        what_counts(sample) for sample in undisturbed.samples
    ]
    assert whole[-1].summary is not None
    assert whole[-1].summary.metrics["total_turns"] == TURNS
    assert generations() - before <= TURNS + GROUPS
    until_all_ingresses_are_there(client)
