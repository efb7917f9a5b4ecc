"""Forks of kept rollouts: the law that each is played as if its log had been posted, and what is refused."""

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.environments import StepRequest, TaskDescription
from deployments.protocols.generation import Generation, GenerationRequest, WeightSpan
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, SampleResult
from rollout_env import ChatMessage, StepOutcome
from service.problems import RequestProblem
from service.rollout_records import recorder
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_requests.result_encoding import json_of
from service.settings import RequestLimits
from tests import virtual_time
from tests.service.rollouts.playing import error_of
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator
from tests.service.scripted_http import ScriptedHttp, tokenizer

LIMITS = RequestLimits(max_body_bytes=2**20, max_rollouts_per_request=100)
FORKS_PER_REQUEST = 4
SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Go"}], "extra_env_info": {"steps": [], "n": 0}}
OWN = {"rollout_id", "parent", "forked_at"}
"""Fields that differ between a fork and its posted log."""


@dataclass
class HashedGenerator(ScriptedGenerator):
    """Its tokens depend on nothing but the prompt, the seed and the stop strings."""

    script: tuple[str, ...] = ("",)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        number = crc32(repr((list(request.prompt_token_ids), request.sampling.seed, request.stop_strings)).encode())
        count = min(1 + number % 5, request.max_new_tokens)
        token_ids = [97 + (number >> place) % 26 for place in range(count)]
        spans = tuple(WeightSpan(str(place), place, min(place + 2, count)) for place in range(0, count, 2))
        return Generation(token_ids, [-((number >> place) % 64) / 64 for place in range(count)], "stop", spans)


@dataclass
class WalkingEnvironment(ScriptedEnvironment):
    """A pure state that grows; a reward, stop strings and an end that depend on state and response alone."""

    script: tuple[Any, ...] = ()
    seen: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """The states of each rollout by turn."""

    async def step(self, request: StepRequest) -> StepOutcome:
        await asyncio.sleep(0)
        self.seen.setdefault(request.rollout_id, {})[request.turn] = deepcopy(request.extra_env_info)
        number = crc32(repr((request.message_log[-1]["content"], request.extra_env_info)).encode())
        info = request.extra_env_info
        state = {"steps": [*info["steps"], number % 10], "n": info["n"] + 1} if number % 4 else None
        stop = [f"s{number % 3}"] if number % 3 else None
        said: ChatMessage = {"role": "user", "content": f"{number % 100}"}
        return StepOutcome(said, {"a": number % 5, "b": 1.0}, number % 7 == 0, state, stop)


def forking_http(keeps: bool = True, generator: ScriptedGenerator | None = None) -> ScriptedHttp:
    store: Any = RolloutRecordStore(RolloutRecordsSettings())
    recorder = RolloutRecorder(store) if keeps else None
    http = ScriptedHttp(LIMITS, generator=generator or HashedGenerator(), recorder=recorder)
    http.environments["math"] = WalkingEnvironment()
    return http


async def played(http: ScriptedHttp, samples: list[dict[str, Any]], **options: Any) -> list[SampleResult]:
    request = RolloutRequest.model_validate({"samples": samples, "max_rollout_turns": 5, "max_seq_len": 90, **options})
    size = await http.rollouts.take_samples(request, lambda _: None)
    results = {position: result async for position, result in await http.rollouts.rollout(request, "request", size)}
    # As a caller reads it.
    return [SampleResult.model_validate_json(json_of(results[place])) for place in sorted(results)]


def turns_of(log: list[Any]) -> list[int]:
    return [place for place, message in enumerate(log) if message.generation_logprobs is not None]


def posted(http: ScriptedHttp, parent: SampleResult, turn: int, log: list[dict[str, Any]]) -> dict[str, Any]:
    """A sample that goes on from this part of a result, as a caller makes it who has watched the environment."""
    generations = [made for made in http.generator.requests if made.rollout_id == parent.rollout_id]
    environment: Any = http.environments["math"]
    state = environment.seen[parent.rollout_id].get(turn, parent.extra_env_info)
    stop = generations[turn].stop_strings if turn < len(generations) else parent.stop_strings
    return {
        "task_name": "math",
        "message_log": log,
        "extra_env_info": state,
        "stop_strings": list(stop),
        "observation_format": parent.observation_format,
    }


def at_turn(http: ScriptedHttp, parent: SampleResult, turn: int) -> dict[str, Any]:
    log, generated = parent.message_log, turns_of(parent.message_log)
    end = generated[turn] if turn < len(generated) else len(log)
    return posted(http, parent, turn, dumped(log[:end]))


def at_token(http: ScriptedHttp, parent: SampleResult, turn: int, kept: int) -> dict[str, Any]:
    """After `kept` tokens of the response of this turn."""
    place = turns_of(parent.message_log)[turn]
    *log, response = dumped(parent.message_log[: place + 1])
    if kept < len(response["token_ids"]):
        spans = [{**one, "end": min(one["end"], kept)} for one in response["weight_versions"] if one["start"] < kept]
        ids = response["token_ids"][:kept]
        response = {
            "role": "assistant",
            "content": tokenizer.decode(ids),
            "token_ids": ids,
            "generation_logprobs": response["generation_logprobs"][:kept],
            "finish_reason": None,
            "weight_versions": spans,
        }
    return posted(http, parent, turn, [*log, response])


def dumped(log: list[Any]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json", exclude_unset=True) for message in log]


def drawn_fork(http: ScriptedHttp, parent: SampleResult, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fork at a random point, and the posted log that must be played alike."""
    generated = turns_of(parent.message_log)
    last = len(generated) - 1 if parent.terminated else len(generated)
    if draw(st.booleans()):
        turn = draw(st.integers(0, last))
        return {"turn": turn}, at_turn(http, parent, turn)
    turn = draw(st.integers(0, len(generated) - 1))
    kept = draw(st.integers(1, len(parent.message_log[generated[turn]].token_ids)))
    before = sum(len(message.token_ids) for message in parent.message_log[: generated[turn]])
    return {"token": before + kept}, at_token(http, parent, turn, kept)


@given(st.integers(0, 2**31), st.data())
@virtual_time.runs
async def test_random_forks_are_played_as_their_logs_are_when_they_are_posted(seed: int, data: st.DataObject) -> None:
    http = forking_http()
    [parent] = await played(http, [{**SAMPLE, "seed": seed}])
    made = [drawn_fork(http, parent, data.draw) for _ in range(FORKS_PER_REQUEST)]
    seeds = [data.draw(st.integers(0, 2**31)) for _ in made]
    points = [{"rollout": parent.rollout_id, **point} for point, _ in made]
    forked = await played(
        http, [{"task_name": "math", "fork": point, "seed": one} for point, one in zip(points, seeds, strict=True)]
    )
    logs = [{**log, "seed": one} for (_, log), one in zip(made, seeds, strict=True)]
    for fork, log, given_log in zip(forked, await played(http, logs), logs, strict=True):
        assert fork.model_dump(exclude=OWN) == log.model_dump(exclude=OWN)
        tokens = sum(len(message["token_ids"]) for message in given_log["message_log"])
        last = given_log["message_log"][-1]
        if last.get("finish_reason", "") is None and given_log["stop_strings"]:
            # Each stop string begins with an s, which is generated again.
            tokens -= len(last["content"]) - len(last["content"].rstrip("s"))
        assert (fork.parent, forked_at(fork)["token"]) == (parent.rollout_id, tokens)


def play_one(http: ScriptedHttp, sample: dict[str, Any], **options: Any) -> SampleResult:
    [result] = asyncio.run(played(http, [sample], **options))
    return result


def parent_of(http: ScriptedHttp, turns: int, **options: Any) -> SampleResult:
    """A rollout of so many turns that its environment has not ended."""
    for seed in range(1000):
        parent = play_one(http, {**SAMPLE, "seed": seed}, max_rollout_turns=turns, **options)
        if not parent.terminated and len(turns_of(parent.message_log)) == turns:
            return parent
    raise AssertionError("No such rollout was drawn.")


def forked_at(result: SampleResult) -> dict[str, int]:
    assert result.forked_at is not None
    return result.forked_at.model_dump()


def fork_of(parent: SampleResult, **point: int) -> dict[str, Any]:
    return {"task_name": "math", "fork": {"rollout": parent.rollout_id, **point}}


def test_a_fork_of_a_fork_has_the_fork_as_its_parent() -> None:
    http = forking_http()
    parent = parent_of(http, 3)
    child = play_one(http, fork_of(parent, turn=1))
    grandchild = play_one(http, fork_of(child, turn=1))
    assert grandchild.parent == child.rollout_id
    assert grandchild.message_log[:3] == parent.message_log[:3]
    problem = refusal(http, fork_of(child, turn=0))
    assert problem["field"] == "samples[0].fork"
    assert "are known from turn 1 on" in problem["message"]
    assert f"or fork {parent.rollout_id}" in problem["message"]


def test_fields_of_the_sample_take_precedence_over_those_of_the_rollout() -> None:
    http = forking_http()
    parent = parent_of(http, 2)
    given_fields = {"extra_env_info": {"steps": [7], "n": 40}, "stop_strings": ["x"], "id": "mine", "color": "blue"}
    fork = play_one(http, {**fork_of(parent, turn=1), **given_fields}, max_rollout_turns=2)
    assert fork.extra_env_info["n"] in (40, 41)
    assert http.generator.requests[-1].stop_strings == ("x",)
    assert (fork.id, fork.model_extra) == ("mine", {"color": "blue"})


def test_a_posted_log_may_name_its_parent_without_a_record() -> None:
    log = {"task_name": "math", "message_log": [{"role": "user", "content": "Go", "token_ids": [71, 111]}]}
    sample = {**log, "extra_env_info": SAMPLE["extra_env_info"], "fork": {"rollout": "elsewhere"}}
    result = play_one(forking_http(keeps=False), sample)
    assert (result.parent, forked_at(result)) == ("elsewhere", {"turn": 0, "token": 2})


# Stop strings

STORY = "so it is 7</answer> and it goes on"
ANSWERED = len("so it is 7</answer>")
IDS = {tokenizer.decode([token_id]): token_id for token_id in range(262)}


class StoryGenerator(ScriptedGenerator):
    """Goes on with the story from where the prompt ends; ends as an engine does, by the text of its own tokens."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        story = [IDS[character] for character in STORY]
        prompt = list(request.prompt_token_ids)
        said = next(count for count in range(len(story), -1, -1) if prompt[len(prompt) - count :] == story[:count])
        ends = (end for end in range(said + 1, len(story)) if request.stop_strings[0] in STORY[said:end])
        token_ids = story[said : next(ends, len(story))]
        return Generation(token_ids, [-0.5] * len(token_ids), "stop")


def story_http() -> tuple[ScriptedHttp, SampleResult]:
    """With a rollout that has told the story up to its stop string."""
    http = forking_http(generator=StoryGenerator([]))
    parent = play_one(http, {**SAMPLE, "stop_strings": ["</answer>"]}, max_rollout_turns=1)
    assert parent.message_log[1].content == STORY[:ANSWERED]
    return http, parent


def cut_log(parent: SampleResult, kept: int, **fields: Any) -> dict[str, Any]:
    """The sample with the log up to so many tokens of the response, which is then partial."""
    prompt, response = dumped(parent.message_log[:2])
    cut: dict[str, Any] = {"content": STORY[:kept], "finish_reason": None, "weight_versions": []}
    cut |= {name: response[name][:kept] for name in ("token_ids", "generation_logprobs")} | fields
    return {**SAMPLE, "messages": None, "message_log": [prompt, {"role": "assistant", **cut}]}


def test_a_fork_inside_a_stop_string_left_its_parent_before_it() -> None:
    http, parent = story_http()
    before = len(parent.message_log[0].token_ids)
    inside = fork_of(parent, token=before + len("so it is 7</ans"))
    assert forked_at(play_one(http, inside, max_rollout_turns=1)) == {"turn": 0, "token": before + len("so it is 7")}


def test_a_partial_response_of_which_nothing_stays_is_generated_anew() -> None:
    http, parent = story_http()
    sample = {**cut_log(parent, 1), "stop_strings": ["so far"]}
    result = play_one(http, sample, max_rollout_turns=1)
    generation = http.generator.requests[-1]
    assert (list(generation.prompt_token_ids), generation.turn) == (parent.message_log[0].token_ids, 0)
    assert result.message_log[1].content == STORY
    alone = play_one(http, {**sample, "message_log": sample["message_log"][1:]}, max_rollout_turns=1)
    assert error_of(alone)["kind"] == "request"
    assert "post the messages before it too" in error_of(alone)["message"]


def test_the_part_of_a_response_that_stays_keeps_its_marks() -> None:
    http, parent = story_http()
    marked = cut_log(parent, ANSWERED - 1, constrained=True, reasoning_content="so", parse_error="It is not whole.")
    response = play_one(http, {**marked, "stop_strings": ["</answer>"]}, max_rollout_turns=1).message_log[1]
    assert response.content == STORY[:ANSWERED]
    assert (response.constrained, response.reasoning_content, response.parse_error) == (True, None, None)


# Refusals


def refusal(http: ScriptedHttp, sample: dict[str, Any]) -> Mapping[str, Any]:
    with pytest.raises(RequestProblem) as raised:
        asyncio.run(played(http, [sample]))
    assert raised.value.problem.status == 422
    [error] = raised.value.problem.errors
    return {"field": error.field, "message": error.message}


WITHIN = "it is within what was said before turn 0, where nothing is generated; fork at that turn"


@pytest.mark.parametrize(
    ("sample", "limit", "said"),
    [
        ({"fork": {"turn": 3}}, None, "the last turn that it can be forked at is 2"),
        ({"fork": {"token": 10_000}}, None, "tokens; send at most as many"),
        ({"fork": {"token": 1}}, None, WITHIN),
        ({"task_name": "sliding_puzzle", "fork": {"turn": 0}}, None, "and the sample's task is 'sliding_puzzle'"),
        ({"fork": {"turn": 0}}, 1000, "take more than 1000 bytes"),
    ],
)
def test_a_point_that_cannot_be_forked_at_is_refused(sample: dict[str, Any], limit: int | None, said: str) -> None:
    http = forking_http()
    parent = parent_of(http, 2)
    if limit is not None:
        http.rollouts.limits = LIMITS.model_copy(update={"max_body_bytes": limit})
    problem = refusal(http, fork_of(parent, **sample["fork"]) | {"task_name": sample.get("task_name", "math")})
    assert problem["field"] == ("samples" if limit else "samples[0].fork")
    assert said in problem["message"]


def test_a_rollout_that_its_environment_has_ended_has_no_turn_after_it() -> None:
    http = forking_http()
    parents = (play_one(http, {**SAMPLE, "seed": seed}) for seed in range(1000))
    parent = next(parent for parent in parents if parent.terminated)
    turns = len(turns_of(parent.message_log))
    assert f"at is {turns - 1}: the environment ended it there" in refusal(http, fork_of(parent, turn=turns))["message"]


def test_a_task_whose_sessions_begin_at_a_prompt_forks_at_its_first_turn() -> None:
    http = forking_http()
    parent = parent_of(http, 2)
    held = TaskDescription("math", "Holds sessions.", fields={}, has_sessions=True)
    http.environments["math"].describe = lambda: asyncio.sleep(0, held)  # type: ignore[method-assign]
    problem = refusal(http, fork_of(parent, turn=1))
    assert problem["field"] == "samples[0].fork"
    assert "it has no fork_session; fork at turn 0" in problem["message"]
    assert play_one(http, fork_of(parent, turn=0)).error is None


def test_a_rollout_without_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT_AFTER_S", (0.0,))
    problem = refusal(forking_http(), {"task_name": "math", "fork": {"rollout": "gone", "turn": 0}})
    assert problem["field"] == "samples[0].fork"
    assert "rollout_records.max_bytes" in problem["message"]


def test_the_bytes_of_a_fork_count_as_those_of_a_body_do() -> None:
    http = forking_http()
    parent = parent_of(http, 1)
    held: list[int] = []
    request = RolloutRequest.model_validate({"samples": [fork_of(parent, turn=0)] * 2})
    size = asyncio.run(http.rollouts.take_samples(request, held.append, body_bytes=100))
    assert held == [size]
    assert size > 100 + 2 * 512


LOG = [{"role": "user", "content": "Q", "token_ids": [1]}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fork": {"rollout": "a"}}, "fork needs turn or token: send one of them"),
        ({"fork": {"rollout": "a", "turn": 1, "token": 1}}, "fork needs turn or token: send one of them"),
        ({**SAMPLE, "fork": {"rollout": "a", "turn": 1}}, "messages and fork are both given"),
        ({"message_log": LOG, "fork": {"rollout": "a", "turn": 1}}, "the log ends at it, leave out turn, token"),
    ],
)
def test_a_fork_has_one_point_and_is_the_only_prompt(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SampleInput.model_validate({"task_name": "math", **fields})
