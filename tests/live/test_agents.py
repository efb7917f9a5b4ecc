"""OpenAI's and Anthropic's official clients on the running service, with and without a session that records them."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from benchmarks.reference_model import token_ids_of
from rollout_client import AsyncRolloutClient, RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import seats_of
from rollout_env import escape_control_tokens, reply_text
from tests.deployments.agents.harbor_rollouts import reward_of, sample_of
from tests.deployments.agents.test_harbor_program import works
from tests.endurance.session_laws.log_probabilities import differences_to_score
from tests.endurance.session_laws.playing import play_sessions
from tests.endurance.session_laws.random_agent import CALCULATOR
from tests.live.played_by_agents import digest_of
from tests.live.played_with_weights import SAME_WEIGHTS_TOLERANCE, generated
from tests.live.running_service import READY_WITHIN_S, replicas, wait_until_idle
from tests.paths import SMALL_MODEL
from tests.virtual_time import runs

QUESTION: Any = {"role": "user", "content": "What is 2 + 3?"}
GREEDY: Any = {"greedy": True, "max_new_tokens": 96}
TOKENS = 800
LETTERS: Any = {"max_tokens": TOKENS, "extra_body": {"allowed_token_ids": [*range(ord("a"), ord("z") + 1)]}}
"""Each token is a whole character, whatever the weights generate."""
ENDLESS: Any = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(small_client: RolloutClient) -> RolloutClient:
    return small_client


@contextmanager
def session_of(client: RolloutClient, **options: Any) -> Iterator[tuple[Any, openai.OpenAI]]:
    """A session, and OpenAI's client of it."""
    with (
        client.sessions.open(**options) as session,
        openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as model,
    ):
        yield session, model


def test_a_model_server_answers_with_ids_and_versions(small_url: str) -> None:
    asked: Any = {"messages": [QUESTION], "seed": 3, "logprobs": True, "n": 2, "extra_body": {"return_token_ids": True}}
    with openai.OpenAI(base_url=f"{small_url}/v1", api_key="any", max_retries=0) as direct:
        [card] = direct.models.list().data
        answer = direct.chat.completions.create(model=card.id, **asked)
    assert (len(answer.choices), answer.model, card.id) == (2, SMALL_MODEL.name, SMALL_MODEL.name)
    for choice in answer.choices:
        extra = choice.model_extra or {}
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(extra["token_ids"])
        assert extra["weight_versions"] == [{"version": "0", "start": 0, "end": len(extra["token_ids"])}]
    assert len((answer.model_extra or {})["prompt_token_ids"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]


def test_log_probabilities_of_a_session_are_those_of_a_rollout(client: RolloutClient) -> None:
    sample = {"task_name": "math", "messages": [QUESTION], "extra_env_info": {"ground_truth": "5"}}
    [played] = client.rollout([sample], sampling=Sampling(**GREEDY)).samples
    with session_of(client, sampling=GREEDY) as (session, model):
        model.chat.completions.create(model="gpt-4o", messages=[QUESTION])
        [branch] = session.samples()
    assert list(branch.message_log[0].token_ids) == list(played.message_log[0].token_ids)
    [recorded], [response] = generated(branch), generated(played)[:1]
    assert list(recorded.token_ids) == list(response.token_ids)
    assert recorded.generation_logprobs == pytest.approx(response.generation_logprobs, abs=1e-3)
    assert [span.version for span in recorded.weight_versions] == ["0"]


def test_a_conversation_with_tools_is_one_branch_of_the_engines_own_ids(client: RolloutClient) -> None:
    with session_of(client, sampling=GREEDY, sample={"task_name": "math", "id": "mine"}) as (session, model):
        ask: Any = {"model": "gpt-4o", "tools": [CALCULATOR], "extra_body": {"return_token_ids": True}}
        first = model.chat.completions.create(messages=[QUESTION], **ask)
        reply = first.choices[0].message
        assert reply.tool_calls is not None
        call = reply.tool_calls[0]
        assert json.loads(call.function.arguments).keys() == {"expression"}
        said: Any = reply.model_dump(exclude_none=True)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        second = model.chat.completions.create(messages=[QUESTION, said, result], **ask)
        retried = model.chat.completions.create(messages=[QUESTION, said, result], temperature=1, **ask)
        session.reward(1.0)
        session.reward({"tools": 0.5}, generation_id=second.id)
        branches = session.samples()
        report = session.drift()
    begun = ids_and_response(first)
    assert prompt_of(second)[: len(begun)] == prompt_of(retried)[: len(begun)] == begun
    assert [token_ids_of(branch) for branch in branches] == [ids_and_response(second), ids_and_response(retried)]
    assert [branch.generation_ids for branch in branches] == [[first.id, second.id], [first.id, retried.id]]
    assert branches[1].shared_messages == [1]
    assert [branch.rewards for branch in branches] == [{"reward": 1.0, "tools": 0.5}, {"reward": 1.0}]
    assert [message.role for message in branches[0].message_log] == ["user", "assistant", "tool", "assistant"]
    assert (branches[0].id, branches[0].task_name, report.counts["rendered_anew"]) == ("mine", "math", 0)


def prompt_of(answer: Any) -> list[int]:
    ids: list[int] = answer.model_extra["prompt_token_ids"]
    return ids


def ids_and_response(answer: Any) -> list[int]:
    return [*prompt_of(answer), *answer.choices[0].model_extra["token_ids"]]


async def read_streamed(answer: Any, stream: bool = False, **_: Any) -> None:
    if stream:
        async for _ in answer:
            pass


async def chat(session: Any, **asked: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as model:
        answer = await model.chat.completions.create(model="gpt-4o", messages=[QUESTION], **asked)
        await read_streamed(answer, **asked)


async def responses(session: Any, **asked: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as model:
        answer = await model.responses.create(model="gpt-4o", input=QUESTION["content"], **asked)
        await read_streamed(answer, **asked)


async def messages(session: Any, **asked: Any) -> None:
    # Imported here: it takes a second, in both processes of the tests.
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.api_key) as model:
        answer = await model.messages.create(model="claude", messages=[QUESTION], max_tokens=96, **asked)
        await read_streamed(answer, **asked)


@runs
async def test_every_api_records_the_same_tokens_streamed_or_not(small_url: str) -> None:
    async with AsyncRolloutClient(small_url) as client, client.sessions.open(sampling=GREEDY) as session:
        calls = [api(session, **asked) for api in (chat, responses, messages) for asked in ({}, {"stream": True})]
        await asyncio.gather(*calls)
        branches = await session.samples()
    assert len(branches) == 6
    assert len({tuple(token_ids_of(branch)) for branch in branches}) == 1
    # vLLM's parser leaves the token that begins a thought in a streamed event of several tokens.
    thoughts = {generated(branch)[0].reasoning_content or "" for branch in branches}
    assert {thought.removeprefix("<think>") for thought in thoughts} == {"2+3=5"}


@runs
async def test_tools_leave_the_policys_distribution_and_strict_ones_are_marked(small_url: str) -> None:
    strict = {"type": "function", "function": {**CALCULATOR["function"], "strict": True}}
    async with AsyncRolloutClient(small_url) as client, client.sessions.open(sampling={"seed": 7}) as session:
        for tool in (CALCULATOR, strict):
            asked: Any = {"tools": [tool], "parallel_tool_calls": False}
            await chat(session, **asked)
        free, bound = await session.samples()
        differences = await differences_to_score(client, [free])
    assert [generated(branch)[0].constrained for branch in (free, bound)] == [None, True]
    assert fmean(differences) <= SAME_WEIGHTS_TOLERANCE


def test_a_json_schema_binds_the_answer_and_not_the_reasoning_before_it(client: RolloutClient) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with session_of(client, sampling=GREEDY) as (session, model):
        model.chat.completions.create(model="any", messages=[QUESTION], response_format=form)
        [branch] = session.samples()
    [response] = generated(branch)
    assert response.reasoning_content == "2+3=5"
    assert json.loads(response.parsed_content).keys() == {"answer"}


def test_a_developer_is_a_system_to_a_template_that_knows_none(client: RolloutClient) -> None:
    prompts = list[list[int]]()
    for role in ("developer", "system"):
        with session_of(client, sampling=GREEDY) as (session, model):
            rules: Any = {"role": role, "content": "Add the numbers."}
            model.chat.completions.create(model="any", messages=[rules, QUESTION])
            [branch] = session.samples()
        prompts.append(token_ids_of(branch))
    assert prompts[0] == prompts[1]


def finish_reasons(model: openai.OpenAI, streams: bool, **asked: Any) -> list[str]:
    answer: Any = model.chat.completions.create(model="m", messages=[QUESTION], **asked, stream=streams)
    choices = [choice for each in (answer if streams else [answer]) for choice in each.choices]
    return [choice.finish_reason for choice in choices if choice.finish_reason is not None]


@pytest.mark.parametrize(("streams", "n"), [(True, 3), pytest.param(False, 1, marks=pytest.mark.long)])
def test_a_call_goes_on_with_weights_that_are_pushed_meanwhile(client: RolloutClient, streams: bool, n: int) -> None:
    with session_of(client) as (session, model), ThreadPoolExecutor() as threads:
        call = threads.submit(finish_reasons, model, streams, n=n, **LETTERS)
        while not session.info().calls_in_flight:
            pass
        client.push_weights(SMALL_MODEL / "model.safetensors")
        assert not call.done()
        assert call.result() == ["length"] * n
        branches = session.samples()
    for branch in branches:
        [response] = generated(branch)
        spans = response.weight_versions
        assert (len(response.token_ids), len(response.generation_logprobs)) == (TOKENS, TOKENS)
        assert len(spans) == 2
        assert [spans[0].start, spans[0].end, spans[1].end] == [0, spans[1].start, TOKENS]
    assert len(branches) == n


def test_a_stream_that_its_agent_leaves_is_recorded_as_far_as_it_came(client: RolloutClient) -> None:
    with session_of(client) as (session, model):
        with model.chat.completions.create(model="m", messages=[QUESTION], stream=True, **ENDLESS) as stream:
            for _, _chunk in zip(range(5), stream, strict=False):
                pass
        wait_until_idle()
        wait_until_recorded(session)
        [branch] = session.samples()
        assert (branch.status, session.info().calls_in_flight) == ("cancelled", 0)
        assert 0 < len(generated(branch)[0].token_ids) < 3000


def wait_until_recorded(session: Any) -> None:
    given_up_at = time.monotonic() + 60
    while session.info().calls_in_flight:
        assert time.monotonic() < given_up_at


def test_a_session_that_ends_aborts_what_runs_and_keeps_its_record(client: RolloutClient) -> None:
    async def ended(session: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as model:
            call = asyncio.create_task(model.chat.completions.create(model="m", messages=[QUESTION], **ENDLESS))
            while not session.info().calls_in_flight:
                await asyncio.sleep(0)
            session.end()
            answer = await call
            with pytest.raises(openai.ConflictError):
                await model.chat.completions.create(model="m", messages=[QUESTION])
            return answer

    with client.sessions.open() as session:
        answer = asyncio.run(ended(session))
        assert answer.choices[0].finish_reason == "abort"
        [branch] = session.samples()
        assert (branch.branch, branch.status) == (answer.id, "cancelled")


def test_rollouts_of_an_agent_have_the_tokens_that_it_was_answered_with(client: RolloutClient) -> None:
    sample = {"task_name": "asked_twice", "messages": [QUESTION], "id": "mine", "difficulty": 2}
    before = {session.id for session in client.sessions.all()}
    response = client.rollout([sample], num_generations=4, sampling=Sampling(seed=3, max_new_tokens=24))
    assert [rollout.generation_index for rollout in response.samples] == [0, 1, 2, 3]
    for rollout in response.samples:
        assert (rollout.status, rollout.error, rollout.id) == ("completed", None, "mine")
        assert [message.role for message in rollout.message_log] == ["user", "assistant", "user", "assistant"]
        assert rollout.rewards == {
            "calls": 2.0,
            "tokens": len(token_ids_of(rollout)),
            "digest": digest_of(token_ids_of(rollout)),
        }
        for response_message in generated(rollout):
            assert len(response_message.generation_logprobs) == len(response_message.token_ids)
            assert [span.version for span in response_message.weight_versions] == [
                generated(rollout)[0].weight_versions[0].version
            ]
    assert len({tuple(token_ids_of(rollout)) for rollout in response.samples}) > 1
    assert response.metrics["environment/agent_calls/mean"] == 2
    while not {session.id for session in client.sessions.all()} <= before:
        pass


@pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")
def test_a_task_of_harbor_is_played_in_its_sandbox_and_judged_there(client: RolloutClient) -> None:
    results = client.rollout([sample_of(number) for number in range(6)], sampling=Sampling(**GREEDY)).samples
    assert [(result.status, result.rewards) for result in results] == [
        ("completed", {"reward": reward_of(number)}) for number in range(6)
    ]
    for result in results:
        assert [message.role for message in result.message_log] == ["user", "assistant"]
        timings = {"sandbox_create_s", "agent_run_s", "verifier_s", "sandbox_destroy_s"}
        assert timings <= (result.metrics.environment or {}).keys()
    [example] = client.example_samples("tasks", 1)
    assert (example.id, example.extra_env_info) == ("examples/count-lines", {"task": "examples/count-lines"})


def commanded(client: RolloutClient, *does: str, **options: Any) -> list[SampleResult]:
    """The rollouts of an agent that is a command, which does this beside a call of the model."""
    samples = [
        {"task_name": "commanded", "messages": [QUESTION], "extra_env_info": {"ground_truth": "5"}, "does": each}
        for each in does
    ]
    return client.rollout(samples, sampling=Sampling(**GREEDY), **options).samples


def test_commands_are_judged_by_the_environment_and_fail_beside_each_other(client: RolloutClient) -> None:
    [asks, crashes, asks_on] = commanded(client, "ask", "crash", "ask on")
    assert (asks.status, asks.total_reward, asks.terminated) == ("completed", 1.0, True)
    assert (crashes.status, crashes.total_reward, len(generated(crashes))) == ("error", None, 1)
    assert crashes.error is not None
    assert (crashes.error.kind, crashes.error.retryable) == ("environment", False)
    assert crashes.error.message.endswith("It wrote to stderr last: The tool is broken.")
    assert (asks_on.status, asks_on.metrics.environment["agent_calls"]) == ("max_turns", 2)
    [other] = asks_on.branches
    assert [message.role for message in other.message_log] == ["user", "assistant"]
    assert other.shared_messages == []


def test_a_record_and_the_call_under_way_outlive_the_store_that_keeps_them(client: RolloutClient) -> None:
    with session_of(client, sampling=GREEDY) as (session, model):
        messages: Any = [QUESTION]
        said = model.chat.completions.create(model="m", messages=messages).choices[0].message.content
        [before] = session.samples()
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        long: Any = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        with model.chat.completions.create(model="m", messages=messages, stream=True, **long) as stream:
            next(iter(stream))
            [store] = replicas("Sessions")
            store.kill()
            store.wait()
            finish_reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
        assert finish_reasons[-1] == "length"
        [after] = session.samples()
        info = session.info()
        assert token_ids_of(after)[: len(token_ids_of(before))] == token_ids_of(before)
        assert [len(message.token_ids) for message in generated(after)][1:] == [200]
        assert (info.calls, info.calls_in_flight, info.branches) == (2, 0, 1)


@pytest.mark.long
def test_a_call_whose_replica_dies_is_made_again_and_recorded_once(client: RolloutClient) -> None:
    with session_of(client) as (session, model), ThreadPoolExecutor() as threads:
        call = threads.submit(finish_reasons, model, False, **ENDLESS)
        while not session.info().calls_in_flight:
            pass
        [replica] = replicas("Generator")
        replica.kill()
        assert call.result() == ["length"]
        [branch] = session.samples()
    assert len(generated(branch)[0].token_ids) == ENDLESS["max_tokens"]


@pytest.mark.long
def test_random_sessions_record_what_their_calls_were_answered(small_url: str) -> None:
    tally = asyncio.run(play_sessions(small_url, range(5000, 5024)))
    assert tally.problems == []
    assert min(tally.stable, tally.streams_left, tally.responses - tally.calls) > 0
    assert fmean(tally.differences) <= SAME_WEIGHTS_TOLERANCE


@pytest.mark.long
def test_a_record_outlives_the_ingress_and_the_generator_that_made_it(client: RolloutClient) -> None:
    with client.sessions.open(sampling=GREEDY) as session:
        asyncio.run(chat(session))
        [before] = session.samples()
        for deployment in ("Ingress", "Generator"):
            [replica] = replicas(deployment)
            replica.kill()
            replica.wait()
        client.wait_until_ready(READY_WITHIN_S)
        [after] = session.samples()
        assert after == before
        asyncio.run(chat(session))
        assert len(session.samples()) == 2


def test_both_seats_of_a_game_have_the_engines_tokens_and_own_rewards(client: RolloutClient) -> None:
    sampling = {"max_new_tokens": 24, "temperature": 1.0}
    answer = client.rollout(client.example_samples("echo", count=1), num_generations=2, sampling=sampling)
    seats = [seat for sample in answer.samples for seat in seats_of(sample)]
    assert [(seat.idx, seat.rewards) for seat in seats] == [(0, {"seat_0": 1.0}), (0, {"seat_1": -1.0})] * 2
    for seat in seats:
        assert [message.role for message in seat.message_log] == ["user", "assistant"] * 2
        assert [message.generation_logprobs is not None for message in seat.message_log] == [False, True] * 2
    first, second = seats[:2]
    heard = escape_control_tokens(reply_text({"role": "assistant", "content": first.message_log[1].content}))
    assert heard in escape_control_tokens(second.message_log[0].content)
    for seat, score in zip(seats, client.score(list(map(token_ids_of, seats))).scores, strict=True):
        assert score.logprobs is not None
        place = 0
        for message in seat.message_log:
            expected = score.logprobs[place : place + len(message.token_ids)]
            if message.generation_logprobs is not None:
                assert list(message.generation_logprobs) == pytest.approx(expected, abs=0.2)
            place += len(message.token_ids)


def test_another_policy_of_the_service_takes_a_seat_that_a_sample_names(client: RolloutClient) -> None:
    [example] = client.example_samples("echo", count=1)
    seats = {"0": {"version": client.policy.state().current}}
    sample = {"task_name": "echo", "extra_env_info": {**example.extra_env_info, "seats": seats}}
    [result] = client.rollout([sample], sampling={"max_new_tokens": 24}).samples
    assert (result.error, result.rewards, result.branches) == (None, {"seat_1": -1.0}, [])
    assert result.metrics.environment["opponent_calls"] == 2
    assert result.metrics.environment["seat_0_reward"] == 1.0


def test_a_policy_plays_the_user_whose_turns_are_masked_and_counted(client: RolloutClient) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
    question, asks_back = (
        {"role": role, "content": text, "token_ids": tokenizer.encode(text, add_special_tokens=False)}
        for role, text in (("user", QUESTION["content"]), ("assistant", "What is 4 + 5?"))
    )
    # It was generated elsewhere, so that the rollout's one turn is the step, which asks the user.
    asks_back |= {"generation_logprobs": [0.0] * len(asks_back["token_ids"]), "finish_reason": "stop"}
    info = {"goal": "To learn what 4 + 5 is.", "judge": {"ground_truth": "9"}}
    sample = {"task_name": "conversation", "message_log": [question, asks_back], "extra_env_info": info}
    [result] = client.rollout([sample], max_rollout_turns=1).samples
    assert result.error is None
    _, _, said = result.message_log
    assert (said.role, said.generation_logprobs, bool(said.content)) == ("user", None, True)
    metrics = result.metrics.environment
    assert (metrics["user_calls"] >= 1, metrics["user_completion_tokens"] >= 1) == (True, True)
    assert metrics["user_prompt_tokens"] > len("You are curt.")
