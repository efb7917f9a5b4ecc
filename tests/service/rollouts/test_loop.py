"""The loop on scripted fakes: its laws and its edges."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import (
    EnvironmentBroken,
    EnvironmentLost,
    GenerationCut,
    GenerationLost,
    GenerationRejected,
    failure_of,
)
from deployments.protocols import Environment, Generation, GenerationRequest, Generator, StepRequest
from rollout_client.contract import Keep, Message, SampleResult
from rollout_env import StepOutcome
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.loop import RolloutContext, play_request, play_sample
from service.rollouts.schedule import AsyncSchedule, LockstepSchedule, Schedule
from tests.service.scripted import (
    EpisodeRecipe,
    ScriptedEnvironment,
    ScriptedGenerator,
    ids_of,
    outcome,
    text_of,
    user_message,
)

EVERYTHING = Keep()


def play(recipe: EpisodeRecipe, generator: Generator, environment: Environment) -> SampleResult:
    return asyncio.run(
        play_sample(recipe.make(), RolloutContext(generator, {"task": environment}, AsyncSchedule()))
    ).result()


def texts(result: SampleResult) -> list[str]:
    return [message.content for message in result.message_log]


def concatenated(messages: list[Message]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


def test_a_sample_plays_until_its_environment_terminates_it() -> None:
    generator = ScriptedGenerator(["A1", "A2"])
    environment = ScriptedEnvironment([outcome("O1", 0.5), outcome("O2", 1.0, terminated=True)])
    result = play(EpisodeRecipe(), generator, environment)
    assert texts(result) == ["Q", "A1", "O1", "A2", "O2"]
    assert [message.reward for message in result.message_log] == [None, 0.5, None, 1.0, None]
    assert (result.status, result.terminated, result.truncated, result.max_turns_reached) == (
        "completed",
        True,
        False,
        False,
    )
    assert result.total_reward == 1.5
    assert result.metrics.model_dump() == {
        "turn_count": 2,
        "total_tokens": 8,
        "assistant_tokens": 4,
        "env_tokens": 4,
        "terminated": True,
        "truncated": False,
        "max_turns_reached": False,
        "total_reward": 1.5,
        "turn_gen_tokens": [2, 2],
        "turn_input_tokens": [1, 5],
    }


def test_the_environment_sees_roles_and_contents_only() -> None:
    environment = ScriptedEnvironment([outcome(terminated=True)])
    play(EpisodeRecipe(), ScriptedGenerator(["A"]), environment)
    assert environment.requests[0].message_log == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    assert environment.requests[0].extra_env_info == {"state": 0}


def test_the_turn_limit_is_reported_only_when_it_is_what_stopped_the_sample() -> None:
    going_on = ScriptedEnvironment([outcome("O")])
    stopped = play(EpisodeRecipe(max_rollout_turns=3), ScriptedGenerator(["A"]), going_on)
    assert (stopped.status, stopped.max_turns_reached, stopped.metrics.turn_count) == ("max_turns", True, 3)
    terminating = ScriptedEnvironment([outcome("O"), outcome("O", terminated=True)])
    completed = play(EpisodeRecipe(max_rollout_turns=2), ScriptedGenerator(["A"]), terminating)
    assert (completed.status, completed.max_turns_reached) == ("completed", False)


def test_metadata_and_stop_strings_are_taken_over_and_none_leaves_them_as_they_are() -> None:
    first = replace(outcome("O"), metadata={"state": 1}, next_stop_strings=["b"], answer="x")
    generator = ScriptedGenerator(["A"])
    environment = ScriptedEnvironment([first, outcome("O"), outcome("O", terminated=True)])
    result = play(EpisodeRecipe(stop_strings=("a",)), generator, environment)
    assert [request.extra_env_info for request in environment.requests] == [{"state": 0}, {"state": 1}, {"state": 1}]
    assert [request.stop_strings for request in generator.requests] == [("a",), ("b",), ("b",)]
    assert result.extra_env_info == {"state": 1}


def test_rewards_by_name_are_summed_by_name_and_in_total() -> None:
    environment = ScriptedEnvironment(
        [outcome(reward={"format": 0.25, "answer": 0.0}), outcome(reward={"answer": 1.0}, terminated=True)]
    )
    result = play(EpisodeRecipe(), ScriptedGenerator(["A"]), environment)
    assert result.rewards == {"format": 0.25, "answer": 1.0}
    assert result.total_reward == 1.25


def test_a_prompt_of_exactly_max_seq_len_is_truncated_before_generating() -> None:
    generator = ScriptedGenerator(["A"])
    result = play(EpisodeRecipe(prompt="QQQ", max_seq_len=3), generator, ScriptedEnvironment([outcome()]))
    assert generator.requests == []
    assert (result.status, result.truncated, result.metrics.turn_count) == ("truncated", True, 0)


def test_a_generation_cut_by_max_seq_len_truncates_and_is_not_stepped() -> None:
    environment = ScriptedEnvironment([outcome("O", 1.0)])
    result = play(EpisodeRecipe(max_seq_len=4), ScriptedGenerator(["AAAAAA"]), environment)
    assert environment.requests == []
    assert texts(result) == ["Q", "AAA"]
    assert (result.status, result.message_log[1].finish_reason, result.total_reward) == ("truncated", "length", 0.0)


def test_a_generation_cut_by_max_new_tokens_is_stepped_and_reported() -> None:
    environment = ScriptedEnvironment([outcome("O", 1.0, terminated=True)])
    result = play(EpisodeRecipe(max_new_tokens=2), ScriptedGenerator(["AAAAAA"]), environment)
    assert texts(result) == ["Q", "AA", "O"]
    assert (result.status, result.message_log[1].finish_reason, result.total_reward) == ("completed", "length", 1.0)


@pytest.mark.parametrize(
    ("max_seq_len", "kept", "status"),
    [(8, "OOOO", "max_turns"), (7, "OOOO", "truncated"), (5, "OO", "truncated"), (4, "O", "truncated")],
)
def test_an_observation_keeps_what_fits_and_its_text_is_cut_to_its_tokens(
    max_seq_len: int, kept: str, status: str
) -> None:
    recipe = EpisodeRecipe(max_seq_len=max_seq_len, max_rollout_turns=1)
    result = play(recipe, ScriptedGenerator(["AA"]), ScriptedEnvironment([outcome("OOOO")]))
    assert text_of(result.message_log[2].token_ids) == result.message_log[2].content == kept
    assert result.status == status


def test_an_empty_observation_is_an_empty_list_of_ids() -> None:
    result = play(EpisodeRecipe(), ScriptedGenerator(["A"]), ScriptedEnvironment([outcome(terminated=True)]))
    assert list(result.message_log[2].token_ids) == []


def test_seeds_repeat_and_differ_by_turn() -> None:
    def seeds(seed: int) -> list[int | None]:
        generator = ScriptedGenerator(["A"])
        play(EpisodeRecipe(seed=seed, max_rollout_turns=3), generator, ScriptedEnvironment([outcome("O")]))
        return [request.sampling.seed for request in generator.requests]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8)}) == 6


def test_the_given_message_log_is_not_changed() -> None:
    given_log = [user_message("Q")]
    before = [message.model_copy(deep=True) for message in given_log]
    recipe = EpisodeRecipe(message_log=lambda _prompt: given_log)
    play(recipe, ScriptedGenerator(["A"]), ScriptedEnvironment([outcome("O", 1.0, terminated=True)]))
    assert given_log == before


def test_a_failing_sample_keeps_its_log_and_leaves_its_siblings_alone() -> None:
    episodes = [EpisodeRecipe(position=position).make() for position in range(3)]
    generator = ScriptedGenerator(["A", GenerationLost("The generator replica died during the call."), "C"])
    environment = ScriptedEnvironment([outcome("O", 1.0, terminated=True)])
    results = collect(episodes, RolloutContext(generator, {"task": environment}, AsyncSchedule()))
    assert [results[position].status for position in range(3)] == ["completed", "error", "completed"]
    assert results[1].error is not None
    assert results[1].error.model_dump() == {
        "kind": "generation",
        "message": "The generator replica died during the call.",
        "retryable": True,
    }
    assert texts(results[1]) == ["Q"]


def test_an_exception_nobody_named_is_an_internal_error() -> None:
    result = play(EpisodeRecipe(), ScriptedGenerator([ZeroDivisionError("by zero")]), ScriptedEnvironment([outcome()]))
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("internal", "ZeroDivisionError: by zero")


def test_an_environment_failure_is_no_reward_of_zero() -> None:
    broken = ScriptedEnvironment([EnvironmentBroken("The environment raised KeyError: 'x'")])
    result = play(EpisodeRecipe(), ScriptedGenerator(["A"]), broken)
    assert (result.status, result.rewards, texts(result)) == ("error", {}, ["Q", "A"])


def test_closing_a_request_cancels_what_is_under_way() -> None:
    generator = ScriptedGenerator(["A"], delay_s=60)
    episodes = [EpisodeRecipe(position=position).make() for position in range(4)]

    context = RolloutContext(generator, {"task": ScriptedEnvironment([outcome()])}, AsyncSchedule())

    async def play_for(seconds: float) -> None:
        playing = play_request(episodes, context, EarlyStopping(Keep(), dict.fromkeys(episodes, 0)))
        async with asyncio.timeout(seconds), aclosing(playing) as finished:
            async for _ in finished:
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(play_for(0.05))
    assert generator.cancelled == 4


def collect(
    episodes: list[Episode], context: RolloutContext, keep: Keep = EVERYTHING, deadline_s: float | None = None
) -> dict[int, SampleResult]:
    """Plays a request and gives its results by position, in the order in which they came out."""
    early_stopping = EarlyStopping(keep, {episode: episode.identity.group for episode in episodes})

    async def drain() -> dict[int, SampleResult]:
        async with aclosing(play_request(episodes, context, early_stopping, deadline_s)) as finished:
            return {episode.identity.position: episode.result() async for episode in finished}

    return asyncio.run(drain())


texts_of_any_length = st.text(alphabet="abc", max_size=6)
outcomes = st.builds(
    outcome, content=texts_of_any_length, reward=st.sampled_from([0.0, 0.5, 1.0]), terminated=st.booleans()
)
recipes = st.builds(
    EpisodeRecipe,
    prompt=st.text(alphabet="q", min_size=1, max_size=6),
    max_seq_len=st.integers(6, 30),
    max_new_tokens=st.none() | st.integers(1, 5),
    max_rollout_turns=st.integers(1, 6),
    observation_format=st.sampled_from(["raw", "chat"]),
)


@given(
    recipe=recipes,
    responses=st.lists(texts_of_any_length, min_size=1, max_size=5),
    script=st.lists(outcomes, min_size=1, max_size=5),
)
def test_tokens_are_only_appended_and_fed_back_exactly(
    recipe: EpisodeRecipe, responses: list[str], script: list[StepOutcome]
) -> None:
    generator = ScriptedGenerator(responses)
    result = play(recipe, generator, ScriptedEnvironment(script))
    log = result.message_log
    turns = [place for place, message in enumerate(log) if message.generation_logprobs is not None]
    assert [list(request.prompt_token_ids) for request in generator.requests] == [
        concatenated(log[:turn]) for turn in turns
    ]
    assert log[0].token_ids == ids_of(recipe.prompt)
    for turn in turns:
        assert len(log[turn].token_ids) == len(log[turn].generation_logprobs or [])
        assert len(log[turn].token_ids) <= (recipe.max_new_tokens or recipe.max_seq_len)


@given(
    recipe=recipes,
    responses=st.lists(texts_of_any_length, min_size=1, max_size=5),
    script=st.lists(outcomes, min_size=1, max_size=5),
)
def test_every_sample_ends_in_one_status_within_its_limits(
    recipe: EpisodeRecipe, responses: list[str], script: list[StepOutcome]
) -> None:
    result = play(recipe, ScriptedGenerator(responses), ScriptedEnvironment(script))
    assert result.metrics.turn_count <= recipe.max_rollout_turns
    assert result.max_turns_reached == (result.status == "max_turns")
    assert len(concatenated(result.message_log)) <= recipe.max_seq_len
    assert result.terminated == (result.status == "completed")
    assert result.truncated >= (result.status == "truncated")
    metrics = result.metrics
    assert metrics.assistant_tokens == sum(metrics.turn_gen_tokens)
    assert len(concatenated(result.message_log)) == len(recipe.prompt) + metrics.total_tokens
    assert result.total_reward == sum(message.reward or 0.0 for message in result.message_log)


@given(st.lists(recipes, max_size=8), st.lists(texts_of_any_length, min_size=1), st.lists(outcomes, min_size=1))
def test_every_episode_that_goes_in_comes_out_exactly_once(
    recipes_of_request: list[EpisodeRecipe], responses: list[str], script: list[StepOutcome]
) -> None:
    episodes = [replace(recipe, position=position).make() for position, recipe in enumerate(recipes_of_request)]
    context = RolloutContext(ScriptedGenerator(responses), {"task": ScriptedEnvironment(script)}, AsyncSchedule())
    results = collect(episodes, context)
    assert sorted(results) == list(range(len(episodes)))
    assert all(result.status is not None for result in results.values())


class SpeakingGenerator(ScriptedGenerator):
    """Says something that depends on nothing but the ids before it, after a while that depends on them too."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        draw = random.Random(repr(request.prompt_token_ids))
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        spoken = "".join(draw.choices("abc", k=draw.randrange(6)))
        token_ids = ids_of(spoken)[: request.max_new_tokens]
        cut = len(spoken) >= request.max_new_tokens
        return Generation(token_ids, [-1.0] * len(token_ids), "length" if cut else "stop")


class JudgingEnvironment(ScriptedEnvironment):
    """Judges by nothing but the conversation and its state."""

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        draw = random.Random(repr((request.message_log, request.extra_env_info)))
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        return StepOutcome(
            {"role": "user", "content": "".join(draw.choices("xyz", k=draw.randrange(6)))},
            reward=draw.choice([0.0, 0.5, 1.0]),
            terminated=draw.random() < 0.2,
            metadata=draw.choice([None, {"state": draw.randrange(9)}]),
            next_stop_strings=draw.choice([None, ["s"]]),
        )


def played(requested: list[EpisodeRecipe], schedule: Schedule) -> dict[int, SampleResult]:
    episodes = [replace(recipe, position=position).make() for position, recipe in enumerate(requested)]
    return collect(episodes, RolloutContext(SpeakingGenerator([]), {"task": JudgingEnvironment([])}, schedule))


@given(st.lists(recipes, max_size=6))
def test_both_schedules_give_the_same_logs_and_rewards(requested: list[EpisodeRecipe]) -> None:
    assert played(requested, LockstepSchedule()) == played(requested, AsyncSchedule())


def test_in_lockstep_all_generate_then_all_step_and_the_finished_drop_out() -> None:
    order: list[str] = []

    class Noting(SpeakingGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            generation = await super().generate(request)
            order.append("generation")
            return generation

    class Judge(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            order.append("step")
            return outcome("o", terminated=request.message_log[0]["content"] == "q" and len(request.message_log) > 3)

    episodes = [
        EpisodeRecipe(prompt=prompt, position=place, max_rollout_turns=3).make()
        for place, prompt in enumerate(["q", "qq", "qqq"])
    ]
    collect(episodes, RolloutContext(Noting([]), {"task": Judge([])}, LockstepSchedule()))
    rounds = ["generation"] * 3 + ["step"] * 3
    assert order == rounds * 2 + ["generation"] * 2 + ["step"] * 2


@given(recipe=recipes, turns_before_the_cut=st.integers(0, 5), between=st.booleans())
def test_a_sample_cut_anywhere_and_posted_back_ends_as_the_uncut_one(
    recipe: EpisodeRecipe, turns_before_the_cut: int, between: bool
) -> None:
    whole = play(recipe, SpeakingGenerator([]), JudgingEnvironment([]))
    first = cut_after(recipe, turns_before_the_cut, between)
    if first.status != "cancelled":
        assert first == whole
        return
    again = replace(
        recipe,
        message_log=lambda _: first.message_log,
        extra_env_info=first.extra_env_info,
        stop_strings=tuple(first.stop_strings),
    )
    resumed = play(again, SpeakingGenerator([]), JudgingEnvironment([]))
    assert resumed.message_log == whole.message_log
    assert (resumed.status, resumed.extra_env_info) == (whole.status, whole.extra_env_info)


def cut_after(recipe: EpisodeRecipe, turns: int, between: bool) -> SampleResult:
    """Plays some turns, and with `between` one generation without its step, then cuts the sample off."""
    episode = recipe.make()

    async def play_some() -> None:
        generator, environment = SpeakingGenerator([]), JudgingEnvironment([])
        for turn in range(turns + 1):
            request = None if episode.done else episode.next_generation()
            if request is None or (turn == turns and not between):
                return
            episode.add_generation(await generator.generate(request))
            if episode.done or turn == turns:
                return
            episode.add_outcome(await environment.step(episode.step_request()))

    asyncio.run(play_some())
    episode.cut_off("cancelled")
    return episode.result()


def test_a_failure_of_the_fleet_is_tried_again_within_the_samples_budget() -> None:
    lost = GenerationLost("The generator replica died during the call.")
    gone = EnvironmentLost("The replica of environment 'task' died during the call.")
    generator = ScriptedGenerator([lost, "A"])
    environment = ScriptedEnvironment([gone, outcome("O", 1.0, terminated=True)])
    result = play(EpisodeRecipe(retries=2), generator, environment)
    assert (result.status, texts(result), result.total_reward) == ("completed", ["Q", "A", "O"], 1.0)
    assert [list(request.prompt_token_ids) for request in generator.requests] == [ids_of("Q")] * 2

    exhausted = play(EpisodeRecipe(retries=1), ScriptedGenerator([lost]), environment)
    assert exhausted.error is not None
    assert (exhausted.status, exhausted.error.retryable) == ("error", True)


def test_a_generation_that_an_update_cut_costs_no_retry() -> None:
    cut = GenerationCut("An update of the weights cut the generation.")
    lost = GenerationLost("The generator replica died during the call.")
    environment = ScriptedEnvironment([outcome("O", 1.0, terminated=True)])
    result = play(EpisodeRecipe(retries=0), ScriptedGenerator([cut, cut, "A"]), environment)
    assert (result.status, texts(result)) == ("completed", ["Q", "A", "O"])
    assert play(EpisodeRecipe(retries=0), ScriptedGenerator([cut, lost]), environment).status == "error"


def test_a_failure_of_the_sample_itself_is_not_tried_again() -> None:
    generator = ScriptedGenerator([GenerationRejected("The engine refused the generation: no.")])
    result = play(EpisodeRecipe(retries=5), generator, ScriptedEnvironment([outcome()]))
    assert (result.status, len(generator.requests)) == ("error", 1)


def test_a_call_that_takes_too_long_is_a_timeout_and_tried_again() -> None:
    generator = ScriptedGenerator(["A"], delay_s=5)
    context = RolloutContext(
        generator, {"task": ScriptedEnvironment([outcome()])}, AsyncSchedule(), generation_timeout_s=0.02
    )
    results = collect([EpisodeRecipe(retries=1).make()], context)
    assert results[0].error is not None
    assert results[0].error.model_dump() == {
        "kind": "timeout",
        "message": "The generation took longer than 0.02 s.",
        "retryable": True,
    }
    assert (len(generator.requests), generator.cancelled) == (2, 2)


def test_at_the_deadline_what_is_done_comes_back_and_the_rest_keeps_its_log() -> None:
    class SlowAfterTheFirstTurn(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            self.delay_s = 60 if len(request.prompt_token_ids) > 3 else 0
            return await super().generate(request)

    class EndingShortGames(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            return outcome("O", 1.0, terminated=request.message_log[0]["content"] == "Q")

    episodes = [EpisodeRecipe(prompt=prompt, position=place).make() for place, prompt in enumerate(["Q", "QQQ"])]
    generator = SlowAfterTheFirstTurn(["A"])
    results = collect(
        episodes, RolloutContext(generator, {"task": EndingShortGames([])}, AsyncSchedule()), deadline_s=0.1
    )
    assert (results[0].status, texts(results[0])) == ("completed", ["Q", "A", "O"])
    assert (results[1].status, texts(results[1])) == ("deadline", ["QQQ", "A", "O"])
    assert results[1].error is None
    assert generator.cancelled == 1


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (
            Keep(per_group=1),
            {0: ["completed", "cancelled"], 1: ["completed", "cancelled"], 2: ["completed", "cancelled"]},
        ),
        (Keep(groups=1), {0: ["completed", "completed"], 1: ["cancelled"] * 2, 2: ["cancelled"] * 2}),
        (
            Keep(groups=2, per_group=1),
            {0: ["completed", "cancelled"], 1: ["completed", "cancelled"], 2: ["cancelled"] * 2},
        ),
    ],
)
def test_enough_is_enough(keep: Keep, kept: dict[int, list[str]]) -> None:
    class Ordered(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            self.delay_s = 0.02 * len(request.prompt_token_ids)
            return await super().generate(request)

    episodes = [
        EpisodeRecipe(prompt="Q" * (1 + position), position=position, group=position // 2).make()
        for position in range(6)
    ]
    generator = Ordered(["A"])
    results = collect(
        episodes,
        RolloutContext(generator, {"task": ScriptedEnvironment([outcome(terminated=True)])}, AsyncSchedule()),
        keep,
    )
    statuses = {group: [results[2 * group + place].status for place in range(2)] for group in range(3)}
    assert statuses == kept
    assert generator.cancelled == sum(status == "cancelled" for group in kept.values() for status in group)


def test_a_failed_rollout_fills_no_group() -> None:
    episodes = [EpisodeRecipe(position=position).make() for position in range(3)]
    generator = ScriptedGenerator([GenerationRejected("no"), "A", "A"])
    environment = ScriptedEnvironment([outcome(terminated=True)])
    results = collect(episodes, RolloutContext(generator, {"task": environment}, AsyncSchedule()), Keep(per_group=2))
    assert [results[position].status for position in range(3)] == ["error", "completed", "completed"]


def test_a_slow_environment_holds_up_nobody_but_its_own_sample() -> None:
    class SlowForOne(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            if request.message_log[0]["content"] == "slow":
                await asyncio.sleep(0.2)
            return outcome(terminated=True)

    episodes = [EpisodeRecipe(prompt=prompt, position=place).make() for place, prompt in enumerate(["slow", "Q", "Q"])]
    results = collect(episodes, RolloutContext(ScriptedGenerator(["A"]), {"task": SlowForOne([])}, AsyncSchedule()))
    assert list(results) == [1, 2, 0]


def test_lockstep_keeps_stop_strings_by_sample_and_none_clears_none() -> None:
    generator = ScriptedGenerator(["A"])
    episodes = [
        EpisodeRecipe(prompt=prompt, position=place, stop_strings=stop_strings, max_rollout_turns=2).make()
        for place, (prompt, stop_strings) in enumerate([("p", ("x",)), ("qq", ())])
    ]
    collect(episodes, RolloutContext(generator, {"task": ScriptedEnvironment([outcome("O")])}, LockstepSchedule()))
    by_prompt: dict[str, list[tuple[str, ...]]] = {"p": [], "q": []}
    for request in generator.requests:
        by_prompt[chr(request.prompt_token_ids[0])].append(request.stop_strings)
    assert by_prompt == {"p": [("x",), ("x",)], "q": [(), ()]}


def test_lockstep_counts_no_truncated_sample_as_terminated_and_ends_it() -> None:
    generator = ScriptedGenerator(["AAAA"])
    environment = ScriptedEnvironment([outcome("O")])
    episodes = [EpisodeRecipe(max_seq_len=4).make()]
    results = collect(episodes, RolloutContext(generator, {"task": environment}, LockstepSchedule()))
    assert (results[0].status, results[0].terminated, results[0].truncated) == ("truncated", False, True)
    assert (len(generator.requests), environment.requests) == (1, [])


@given(seed=st.integers(0, 10_000), groups=st.integers(1, 3), size=st.integers(1, 4))
def test_lockstep_never_deadlocks_whoever_is_cancelled_fails_or_ends(seed: int, groups: int, size: int) -> None:
    draw = random.Random(seed)

    class Uneven(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            for _ in range(draw.randrange(5)):
                await asyncio.sleep(0)
            if draw.random() < 0.1:
                raise EnvironmentBroken("no")
            return outcome("o", terminated=draw.random() < 0.3)

    keep = Keep(per_group=draw.randint(1, size), groups=draw.choice([None, draw.randint(1, groups)]))
    episodes = [
        EpisodeRecipe(position=place, group=place // size, max_rollout_turns=4).make() for place in range(groups * size)
    ]
    context = RolloutContext(SpeakingGenerator([]), {"task": Uneven([])}, LockstepSchedule())
    results = collect(episodes, context, keep, deadline_s=5)
    assert sorted(results) == list(range(groups * size))
    assert all(result.status != "deadline" for result in results.values())
    assert all(result.error is None or result.error.message == "no" for result in results.values())


def test_a_call_that_cancels_itself_loses_no_sample() -> None:
    class GivingUp(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            raise asyncio.CancelledError

    results = collect(
        [EpisodeRecipe().make()], RolloutContext(GivingUp([]), {"task": ScriptedEnvironment([])}, AsyncSchedule())
    )
    assert results[0].error is not None
    assert results[0].error.message == "A call of the sample was cancelled."


def test_a_resumed_sample_whose_step_is_due_stays_in_step_with_the_others() -> None:
    order: list[str] = []

    class Noting(SpeakingGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            order.append("generation")
            return await super().generate(request)

    class Judge(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            order.append("step")
            return outcome("o")

    unjudged = Message(role="assistant", content="a", token_ids=[97], generation_logprobs=[-1.0], finish_reason="stop")
    resumed = EpisodeRecipe(position=1, message_log=lambda _: [user_message("Q"), unjudged], max_rollout_turns=2)
    episodes = [EpisodeRecipe(max_rollout_turns=2).make(), resumed.make()]
    collect(episodes, RolloutContext(Noting([]), {"task": Judge([])}, LockstepSchedule()))
    assert order == ["generation", "step", "step", "generation", "generation", "step", "step"]


def test_the_deadline_holds_however_slowly_the_results_are_read() -> None:
    class Endless(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            await asyncio.sleep(0.01)
            return outcome("o")

    episodes = [EpisodeRecipe(position=place, max_rollout_turns=10_000).make() for place in range(3)]
    context = RolloutContext(ScriptedGenerator(["A"]), {"task": Endless([])}, AsyncSchedule())

    async def read_slowly() -> list[int]:
        turns = []
        early_stopping = EarlyStopping(EVERYTHING, dict.fromkeys(episodes, 0))
        async with aclosing(play_request(episodes, context, early_stopping, deadline_s=0.1)) as finished:
            async for episode in finished:
                turns.append(episode.result().metrics.turn_count)
                await asyncio.sleep(0.2)
        return turns

    turns = asyncio.run(read_slowly())
    assert max(turns) - min(turns) <= 1


def test_what_was_cut_off_takes_nothing_more() -> None:
    episode = EpisodeRecipe().make()
    episode.cut_off("deadline")
    before = episode.result()
    episode.add_generation(Generation([65], [-1.0], "stop"))
    episode.add_outcome(outcome("O", 1.0, terminated=True))
    episode.fail(failure_of(ZeroDivisionError()))
    assert episode.result() == before


def test_a_log_that_max_seq_len_cut_is_truncated_when_it_is_posted_back_unchanged() -> None:
    cut = play(EpisodeRecipe(max_seq_len=4), ScriptedGenerator(["AAAAAA"]), ScriptedEnvironment([outcome("O", 1.0)]))
    environment = ScriptedEnvironment([outcome("O", 1.0)])
    again = play(
        EpisodeRecipe(max_seq_len=4, message_log=lambda _: cut.message_log), ScriptedGenerator(["A"]), environment
    )
    assert (again.status, again.message_log, environment.requests) == ("truncated", cut.message_log, [])
