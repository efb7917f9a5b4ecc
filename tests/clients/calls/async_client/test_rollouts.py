"""What a rollout sends and returns, against a scripted service."""

import asyncio
import re

import pytest
from fastapi.responses import Response

from rollout_client import AsyncRolloutClient, Message, SampleInput, Sampling, StreamBroken
from rollout_client.contract.messages import PromptMessage
from rollout_client.errors import ResponseNotUnderstood
from tests.clients.client_calls import breaking_server, call, play, play_arrow
from tests.clients.scripted_service import (
    DIED,
    HUNG_UP_WITHIN_S,
    SUMMARY,
    Json,
    ScriptedService,
    arrow,
    ndjson,
    result,
    sample,
)
from tests.virtual_time import end_by_cancellation, runs


def test_only_what_is_given_is_sent(service: ScriptedService) -> None:
    play(service.url, sample(note="mine"), max_seq_len=None)
    assert service.bodies == [{"samples": [sample(note="mine")]}]


def test_typed_samples_and_sampling_are_sent_without_unset_fields(service: ScriptedService) -> None:
    typed = SampleInput(
        task_name="math",
        messages=[PromptMessage(role="user", content="Hi")],
        further=[1],  # type: ignore[call-arg]
    )
    options: Json = {"num_generations": 2, "max_seq_len": 64, "max_rollout_turns": 3, "observation_format": "raw"}
    play(service.url, typed, sampling=Sampling(temperature=0.5), **options)
    sent = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}], "further": [1]}
    assert service.bodies == [{"samples": [sent], "sampling": {"temperature": 0.5}, **options}]


def test_a_message_log_that_came_back_can_be_posted_again(service: ScriptedService) -> None:
    came_back = play(service.url, sample()).samples[0].message_log
    play(service.url, {"task_name": "math", "message_log": came_back})
    assert [Message(**message) for message in service.bodies[1]["samples"][0]["message_log"]] == came_back


@pytest.mark.parametrize("progress", [False, True])
def test_results_come_in_input_order_whatever_their_idx(service: ScriptedService, progress: bool) -> None:
    response = play(service.url, sample(idx=7), sample(idx=7), sample(idx=3), num_generations=2, progress=progress)
    expected = [(idx, generation) for idx in (7, 7, 3) for generation in range(2)]
    assert [(played.idx, played.generation_index) for played in response.samples] == expected
    assert response.model_dump(exclude={"samples"}, exclude_unset=True) == SUMMARY


def test_progress_counts_rollouts_tokens_failures(service: ScriptedService, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"position": 1, "sample": result(1, status="error", error=DIED)}
    service.rollouts.append(lambda _: ndjson(failed, {"position": 0, "sample": result()}, {"summary": SUMMARY}))
    play(service.url, sample(), sample(), progress=True)
    assert re.search(r"2/2 rollouts, [\d,]+ tokens/s, mean reward 1\.000, 1 failed", capsys.readouterr().err)


def test_rollouts_as_arrow_are_asked_for_and_answered_as_in_json(service: ScriptedService) -> None:
    asked: Json = {"num_generations": 2, "sampling": Sampling(temperature=0.5)}
    samples = [sample(idx=7, note=None), sample(idx=3)]
    by_json = play(service.url, *samples, **asked)
    by_arrow = play_arrow(service.url, *samples, **asked)
    assert service.bodies[0] == service.bodies[1]
    assert by_arrow.to_response() == by_json


def test_an_arrow_answer_that_broke_off_is_an_error(service: ScriptedService) -> None:
    whole = arrow(result()).body
    service.rollouts += [lambda _: Response(whole[:-100]), lambda _: ndjson({"summary": SUMMARY})]
    for _ in range(2):
        with pytest.raises(ResponseNotUnderstood, match="not an Arrow stream, or not a whole one"):
            play_arrow(service.url, sample())
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(whole)}\r\n\r\n".encode()
    with breaking_server([head + whole[:-100]]) as (url, _), pytest.raises(StreamBroken, match="broke off"):
        play_arrow(url, sample(), retries=0)


@runs
async def test_cancelling_a_rollout_ends_the_request(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging())
    async with AsyncRolloutClient(service.url) as client:
        rollout = asyncio.create_task(client.rollout([sample()]))
        assert await asyncio.to_thread(service.hangs.wait, HUNG_UP_WITHIN_S)
        await end_by_cancellation(rollout)
        assert await asyncio.to_thread(service.hung_up.wait, HUNG_UP_WITHIN_S)


@runs
async def test_many_async_rollouts_run_at_once(service: ScriptedService) -> None:
    at_once = 150
    arrived: list[int] = []
    all_here = asyncio.Event()

    @service.app.post("/together/rollout")
    async def together() -> Json:
        arrived.append(1)
        if len(arrived) == at_once:
            all_here.set()
        await all_here.wait()
        return {**SUMMARY, "samples": [result()]}

    async with AsyncRolloutClient(f"{service.url}/together", timeout_s=120) as client:
        assert len(await asyncio.gather(*(client.rollout([sample()]) for _ in range(at_once)))) == at_once


def test_tasks_and_their_samples_come_typed_and_ready_to_post(service: ScriptedService) -> None:
    async def ask(client: AsyncRolloutClient) -> list[str]:
        await client.rollout(await client.example_samples("a/b c", count=2, seed=5))
        return [task.task_name for task in await client.tasks()]

    assert call(service.url, ask) == ["math"]
    assert service.bodies == [{"samples": [sample("a/b c", seed=5)] * 2}]
