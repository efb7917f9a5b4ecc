"""The state machine of one rollout: its laws, its limits, its statuses."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import EnvironmentRejected, failure_of
from deployments.protocols.chat import ChatOptions, TokenizedObservation
from deployments.protocols.generation import Generation, SamplingOptions, WeightSpan, derived_seed
from rollout_client.contract.messages import Message, WeightVersionSpan
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import resumed
from rollout_env import ChatMessage, StepOutcome
from service.rollout_records.recorder import _plain_fields
from service.rollouts.episode import Episode
from tests import virtual_time
from tests.service.rollouts.playing import (
    InterruptedGenerator,
    RandomEnvironment,
    RandomGenerator,
    error_of,
    generation_due,
    outcomes,
    play,
    recipes,
    texts,
    texts_of_any_length,
)
from tests.service.scripted import (
    CharacterChatTokenizer,
    EpisodeRecipe,
    RecordingChatTokenizer,
    ScriptedEnvironment,
    ScriptedGenerator,
    first_part,
    ids_of,
    outcome,
    text_of,
    user_message,
)

UNSTEPPED = Message(role="assistant", content="a", token_ids=[97], generation_logprobs=[-1.0], finish_reason="stop")


def concatenated(messages: list[Message]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


def generation(text: str = "A", *spans: WeightSpan) -> Generation:
    return Generation(ids_of(text), [-1.0] * len(text), "stop", spans)


def test_a_generation_is_requested_with_the_limits_and_ids_of_its_rollout() -> None:
    recipe = EpisodeRecipe(prompt="QQ", max_seq_len=10, max_new_tokens=20, stop_strings=("s",), position=5, group=2)
    episode = recipe.make()
    first = generation_due(episode)
    assert (first.generation_id, first.rollout_id, first.group) == ("request-5-0-0", "request-5-0", "request-2")
    assert (first.turn, first.request_id, first.max_new_tokens, first.stop_strings) == (0, "request", 8, ("s",))
    episode.add_generation(generation("A"))
    episode.add_outcome(outcome("OO"))
    second = generation_due(episode)
    assert (second.generation_id, second.max_new_tokens, second.turn) == ("request-5-0-1", 5, 1)
    assert list(first.prompt_token_ids) == ids_of("QQ"), "a request is not changed by later turns"


def test_the_environment_gets_the_conversation_and_its_own_state() -> None:
    episode = EpisodeRecipe(position=5).make()
    episode.add_generation(generation("A"))
    request = episode.step_request()
    assert request.message_log == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "token_count": 1, "finish_reason": "stop"},
    ]
    assert request.extra_env_info == {"state": 0}
    assert (request.request_id, request.rollout_id, request.sample) == ("request", "request-5-0", 5)


def test_rewards_by_name_are_summed_and_the_last_answer_is_reported() -> None:
    first = replace(outcome(reward={"format": 0.25, "answer": 0.5}), answer="x")
    last = replace(outcome(reward={"answer": 1.0}, terminated=True), answer="y")
    result = play(EpisodeRecipe(), ScriptedGenerator(["A"]), ScriptedEnvironment([first, last]))
    assert (result.rewards, result.answer) == ({"format": 0.25, "answer": 1.5}, "y")
    assert (result.total_reward, result.metrics.total_reward) == (1.75, 1.75)
    assert [message.reward for message in result.message_log] == [None, 0.75, None, 1.0, None]
    assert result.metrics.turn_input_tokens == [1, 2]


@pytest.mark.parametrize(
    ("limits", "part", "room"),
    [
        ({"prompt": "QQQ", "max_seq_len": 2}, "", None),
        ({"prompt": "QQQ", "max_seq_len": 3}, "", None),
        ({"prompt": "QQQ", "max_seq_len": 4}, "", 1),
        ({"prompt": "QQ", "max_seq_len": 10, "max_new_tokens": 3}, "", 3),
        ({"prompt": "Q", "max_seq_len": 6}, "AB", 3),
    ],
)
def test_a_generation_has_the_room_that_its_limits_leave(limits: dict[str, Any], part: str, room: int | None) -> None:
    episode = EpisodeRecipe(**limits).make()
    episode.add_generation(interrupted(part))
    request = episode.next_generation()
    assert (request and request.max_new_tokens) == room
    assert episode.status == ("truncated" if room is None else None)


def test_an_observation_is_tokenized_with_the_room_that_is_left() -> None:
    tokenizer = RecordingChatTokenizer()
    episode = EpisodeRecipe(tokenizer=tokenizer, max_seq_len=10, observation_format="chat").make()
    episode.add_generation(generation("AB"))
    episode.add_outcome(outcome("O"))
    assert [asked[:3] for asked in tokenizer.asked] == [(ids_of("AB"), ChatOptions("chat"), 7)]


TOOL_RESULTS: list[ChatMessage] = [
    {"role": "tool", "content": "42", "tool_call_id": "a", "name": "add"},
    {"role": "tool", "content": "7", "tool_call_id": "b"},
    {"role": "user", "content": "Go on."},
]


def test_all_messages_of_an_observation_are_appended() -> None:
    episode = EpisodeRecipe(prompt="Q").make()
    episode.add_generation(generation("A"))
    episode.add_outcome(StepOutcome(TOOL_RESULTS, 0.0, terminated=False))
    assert list(generation_due(episode).prompt_token_ids) == ids_of("QA427Go on.")
    episode.add_generation(generation("B"))
    assert episode.step_request().message_log[2:5] == TOOL_RESULTS
    log = episode.result().message_log[2:5]
    fields = [message.model_fields_set - {"token_ids", "reward"} for message in log]
    assert [{name: getattr(message, name) for name in names} for message, names in zip(log, fields, strict=True)] == (
        TOOL_RESULTS
    )
    assert episode.result().metrics.env_tokens == len("427Go on.")


def test_messages_of_an_observation_that_have_no_room_are_left_out() -> None:
    episode = EpisodeRecipe(prompt="Q", max_seq_len=5).make()
    episode.add_generation(generation("A"))
    said = [TOOL_RESULTS[0], ChatMessage(role="tool", content="789"), TOOL_RESULTS[2]]
    episode.add_outcome(StepOutcome(said, 0.0, terminated=False))
    assert (episode.status, texts(episode.result())) == ("truncated", ["Q", "A", "42", "7"])


@pytest.mark.parametrize(("max_seq_len", "truncated"), [(1000, False), (3, True)])
def test_an_episode_may_end_without_an_observation(max_seq_len: int, truncated: bool) -> None:
    last = StepOutcome(None, {"right": 1.0}, terminated=True, answer="2")
    result = play(EpisodeRecipe(max_seq_len=max_seq_len), ScriptedGenerator(["AA"]), ScriptedEnvironment([last]))
    assert texts(result) == ["Q", "AA"]
    assert (result.message_log[1].reward, result.rewards, result.answer) == (1.0, {"right": 1.0}, "2")
    assert (result.status, result.terminated, result.truncated) == ("completed", True, truncated)
    assert (result.metrics.env_tokens, result.metrics.total_tokens) == (0, 2)


def test_a_result_is_not_changed_by_what_is_played_after_it() -> None:
    episode = EpisodeRecipe().make()
    episode.add_generation(generation())
    before = episode.result()
    copy = before.model_copy(deep=True)
    episode.add_outcome(outcome("O", 1.0))
    assert before == copy


def test_the_fields_of_the_sample_come_back_unchanged() -> None:
    recipe = EpisodeRecipe(position=4, group=1, observation_format="chat")
    further = {"self": 1, "cls": 2}
    identity = replace(recipe.identity(), id="mine", generation_index=3, idx=17, further_fields=further)
    result = Episode(identity, recipe.start(), recipe.limits(), recipe.tokenizer).result()
    assert (result.id, result.idx, result.generation_index, result.task_name) == ("mine", 17, 3, "task")
    assert (result.observation_format, result.model_extra) == ("chat", further)
    assert result.model_dump(exclude_unset=True)["self"] == 1


def test_chat_options_come_back_only_if_they_were_given() -> None:
    recipe = EpisodeRecipe()
    plain = recipe.make().result()
    assert plain.model_fields_set.isdisjoint({"id", "answer", "error", "tools", "chat_template_kwargs"})
    chat = ChatOptions("raw", tools=[{"name": "t"}], chat_template_kwargs={"k": True})
    episode = Episode(recipe.identity(), replace(recipe.start(), chat=chat), recipe.limits(), recipe.tokenizer)
    for options in (episode.result(), resumed(episode.result())):
        assert (options.tools, options.chat_template_kwargs) == ([{"name": "t"}], {"k": True})


def test_a_failed_episode_keeps_its_log_and_has_no_reward() -> None:
    episode = EpisodeRecipe().make()
    episode.add_generation(generation())
    episode.add_outcome(outcome("O", 1.0))
    episode.fail(failure_of(EnvironmentRejected("no")))
    result = episode.result()
    assert (result.status, texts(result)) == ("error", ["Q", "A", "O"])
    assert error_of(result) == {"kind": "environment", "message": "no", "retryable": False}
    assert (result.total_reward, result.metrics.total_reward) == (None, None)


@pytest.mark.parametrize("end", ["deadline", "cancelled", "error"])
def test_nothing_changes_an_episode_that_has_ended(end: str) -> None:
    episode = EpisodeRecipe().make()
    if end == "error":
        episode.fail(failure_of(ValueError("first")))
    else:
        episode.cut_off("deadline" if end == "deadline" else "cancelled")
    before = episode.result()
    episode.add_generation(generation())
    episode.add_outcome(outcome("O", 1.0, terminated=True))
    episode.fail(failure_of(ValueError("second")))
    episode.cut_off("cancelled" if end == "deadline" else "deadline")
    assert episode.result() == before
    assert before.status == end
    assert episode.was_cut_off == (end != "error")


def test_an_observation_that_cannot_be_tokenized_changes_nothing() -> None:
    class Refusing(CharacterChatTokenizer):
        def observations(self, *_args: Any, **_options: Any) -> list[TokenizedObservation]:
            raise EnvironmentRejected("no such role")

    episode = EpisodeRecipe(tokenizer=Refusing()).make()
    episode.add_generation(generation())
    before = episode.result()
    with pytest.raises(EnvironmentRejected):
        episode.add_outcome(outcome("O", 1.0, terminated=True))
    assert episode.result() == before


def test_a_posted_message_of_another_author_is_answered() -> None:
    given = UNSTEPPED.model_copy(update={"generation_logprobs": None})
    recipe = EpisodeRecipe(message_log=lambda _: [user_message("Q"), given])
    result = play(recipe, ScriptedGenerator(["B"]), ScriptedEnvironment([outcome("O", terminated=True)]))
    assert texts(result) == ["Q", "a", "B", "O"]


PARTIAL = Message(
    role="assistant",
    content="ab",
    token_ids=ids_of("ab"),
    generation_logprobs=[-1.0, -0.5],
    weight_versions=[WeightVersionSpan(version="1", start=0, end=2)],
)
PARTIAL_LOG = [user_message("Q"), PARTIAL]


def interrupted(text: str, *spans: WeightSpan) -> Generation:
    return Generation(ids_of(text), [-0.25] * len(text), "abort", spans)


def test_an_interrupted_generation_goes_on_as_the_same_message() -> None:
    episode = EpisodeRecipe(max_new_tokens=5, seed=7).make()
    episode.add_generation(interrupted("AB", WeightSpan("1", 0, 2)))
    assert (episode.step_is_due, episode.done) == (False, False)
    partial = episode.result().message_log[1]
    assert (partial.content, partial.finish_reason, len(partial.generation_logprobs or ())) == ("AB", None, 2)
    request = generation_due(episode)
    assert (request.generation_id, list(request.prompt_token_ids)) == ("request-0-0-0-2", ids_of("QAB"))
    assert (request.max_new_tokens, request.sampling.seed) == (3, derived_seed(7, 0, 2))
    episode.add_generation(generation("CD", WeightSpan("1", 0, 1), WeightSpan("2", 1, 2)))
    assert episode.step_is_due
    result = episode.result()
    response = result.message_log[1]
    assert (response.content, list(response.token_ids), response.finish_reason) == ("ABCD", ids_of("ABCD"), "stop")
    assert list(response.generation_logprobs or ()) == [-0.25, -0.25, -1.0, -1.0]
    spans = [(span.version, span.start, span.end) for span in response.weight_versions or ()]
    assert spans == [("1", 0, 3), ("2", 3, 4)]
    metrics = result.metrics
    assert (metrics.turn_count, metrics.turn_gen_tokens, metrics.turn_input_tokens) == (1, [4], [1])


def test_a_generation_interrupted_before_its_first_token_leaves_no_trace() -> None:
    episode = EpisodeRecipe(seed=7).make()
    before, request = episode.result(), generation_due(episode)
    episode.add_generation(interrupted(""))
    assert episode.result() == before
    assert episode.next_generation() == request


def test_a_posted_partial_response_goes_on_as_the_same_message_and_turn() -> None:
    recipe = EpisodeRecipe(message_log=lambda _: PARTIAL_LOG, max_rollout_turns=1, seed=7)
    result = play(recipe, generator := ScriptedGenerator(["C"]), ScriptedEnvironment([outcome("O", 1.0)]))
    assert (texts(result), result.status, result.total_reward) == (["Q", "abC", "O"], "max_turns", 1.0)
    assert [list(request.prompt_token_ids) for request in generator.requests] == [ids_of("Qab")]
    assert [request.sampling.seed for request in generator.requests] == [derived_seed(7, 0, 2)]
    assert (result.metrics.turn_gen_tokens, result.metrics.turn_input_tokens) == ([1], [3])
    assert PARTIAL.content == "ab", "what was posted is not changed"


@pytest.mark.parametrize("part", [interrupted("AB"), interrupted(""), generation("AB")])
def test_an_interrupted_episode_ends_with_its_generation(part: Generation) -> None:
    episode = EpisodeRecipe().make()
    episode.next_generation()
    episode.interrupt("deadline")
    episode.interrupt("cancelled")
    assert (episode.done, episode.interrupted_by) == (False, "deadline")
    episode.add_generation(part)
    result = episode.result()
    assert (result.status, "".join(texts(result))) == ("deadline", "Q" + text_of(part.token_ids))


def test_an_interrupted_episode_whose_generation_failed_begins_no_other() -> None:
    episode = EpisodeRecipe().make()
    episode.interrupt("cancelled")
    assert episode.next_generation() is None
    assert episode.status == "cancelled"


@given(recipe=recipes, seed=st.integers(0, 10_000))
def test_an_interrupted_episode_ends_like_the_uninterrupted_one(recipe: EpisodeRecipe, seed: int) -> None:
    whole = play(recipe, RandomGenerator(), RandomEnvironment())
    interrupted = play(replace(recipe, retries=10_000), InterruptedGenerator(seed), RandomEnvironment())
    assert merged(origins(interrupted)) == origins(whole), "only the generations differ, which made the same tokens"
    assert interrupted.model_copy(update={"replay": whole.replay}) == whole


def origins(result: SampleResult) -> list[tuple[int, int, int]]:
    if result.replay is None:
        return []
    made = SampleResult.model_validate(_plain_fields(result)).replay
    assert made is not None
    return [(one.message, one.start, one.end) for one in made.generations]


def merged(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those of one message as one, if each begins where the one before has ended."""
    whole: list[tuple[int, int, int]] = []
    for message, start, end in parts:
        if whole and whole[-1][0] == message and whole[-1][2] == start:
            whole[-1] = (message, whole[-1][1], end)
        else:
            whole.append((message, start, end))
    return whole


def test_a_replay_has_stop_strings_where_they_change() -> None:
    outcomes = [replace(outcome("O"), next_stop_strings=stops) for stops in (["x"], ["x"], [])]
    sampling: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7}
    recipe = EpisodeRecipe(stop_strings=("s",), max_rollout_turns=4, sampling=SamplingOptions(**sampling))
    result = play(recipe, ScriptedGenerator(["AB"]), ScriptedEnvironment(outcomes))
    changes: list[dict[str, Any]] = [{"stop_strings": ["s"]}, {"stop_strings": ["x"]}, {}, {"stop_strings": []}]
    assert _plain_fields(result)["replay"] == sampling | {
        "service_version": "",
        "engine": "",
        "ignore_eos": False,
        "max_seq_len": 1000,
        "max_new_tokens": None,
        "generations": [
            {"message": 1 + 2 * turn, "start": 0, "end": 2, "replica": "", **stops}
            for turn, stops in enumerate(changes)
        ],
    }


@given(
    recipe=recipes,
    responses=st.lists(texts_of_any_length, min_size=1, max_size=5),
    script=st.lists(outcomes, min_size=1, max_size=5),
)
def test_every_episode_appends_tokens_and_ends_within_its_limits(
    recipe: EpisodeRecipe, responses: list[str], script: list[StepOutcome]
) -> None:
    generator = ScriptedGenerator(responses)
    result = play(recipe, generator, ScriptedEnvironment(script))
    log, metrics = result.message_log, result.metrics
    turns = [place for place, message in enumerate(log) if message.generation_logprobs is not None]
    assert [list(one.prompt_token_ids) for one in generator.requests] == [concatenated(log[:turn]) for turn in turns]
    assert log[0].token_ids == ids_of(recipe.prompt)
    for turn in turns:
        assert len(log[turn].token_ids) == len(log[turn].generation_logprobs or [])
        assert len(log[turn].token_ids) <= (recipe.max_new_tokens or recipe.max_seq_len)
    assert origins(result) == [(turn, 0, len(log[turn].token_ids)) for turn in turns]
    assert result.status in ("completed", "truncated", "max_turns")
    assert metrics.turn_count <= recipe.max_rollout_turns
    assert result.max_turns_reached == (result.status == "max_turns")
    assert len(concatenated(log)) <= recipe.max_seq_len
    assert result.terminated == (result.status == "completed")
    assert result.truncated >= (result.status == "truncated")
    assert metrics.assistant_tokens == sum(metrics.turn_gen_tokens)
    assert metrics.clipped_turns == sum(message.finish_reason == "length" for message in log)
    assert len(concatenated(log)) == len(recipe.prompt) + metrics.total_tokens
    assert result.total_reward == sum(message.reward or 0.0 for message in log)


@given(recipe=recipes, turns_before_the_cut=st.integers(0, 5), tokens=st.none() | st.integers(0, 6))
def test_an_episode_cut_off_and_posted_again_ends_like_the_uncut_one(
    recipe: EpisodeRecipe, turns_before_the_cut: int, tokens: int | None
) -> None:
    whole = play(recipe, RandomGenerator(), RandomEnvironment())
    first = cut_after(recipe, turns_before_the_cut, tokens)
    if first.status != "cancelled":
        assert first == whole
        return
    again = replace(
        recipe,
        message_log=lambda _: first.message_log,
        extra_env_info=first.extra_env_info,
        stop_strings=tuple(first.stop_strings),
    )
    resumed = play(again, RandomGenerator(), RandomEnvironment())
    assert resumed.message_log == whole.message_log
    assert (resumed.status, resumed.extra_env_info) == (whole.status, whole.extra_env_info)


def cut_after(recipe: EpisodeRecipe, turns: int, tokens: int | None) -> SampleResult:
    """Plays some turns and so many tokens of a further generation, then cuts the episode off.

    `None`: no further generation. A generation that has no more tokens is whole, and not stepped.
    """
    episode = recipe.make()

    async def play_some() -> None:
        generator, environment = RandomGenerator(), RandomEnvironment()
        for turn in range(turns + 1):
            request = None if episode.done else episode.next_generation()
            if request is None or (turn == turns and tokens is None):
                return
            generation = await generator.generate(request)
            if turn == turns and tokens is not None:
                is_whole = tokens >= len(generation.token_ids)
                episode.add_generation(generation if is_whole else first_part(generation, tokens))
                return
            episode.add_generation(generation)
            episode.add_outcome(await environment.step(episode.step_request()))

    virtual_time.run(play_some())
    episode.cut_off("cancelled")
    return episode.result()
