"""The rollout loop on scripted ports, in virtual time: siblings, failures, deadlines, early stopping, cancellation."""

import asyncio
import logging
import random
import threading
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import GenerationLost, GenerationRejected, TurnTimedOut
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import Keep, SampleInput
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.group_selection import EarlyStopping
from service.rollouts.loop import MOST_CHARACTERS_INLINE, RolloutContext, RunningEpisodes, _play_sample
from service.rollouts.pacing import LockstepSchedule, LoopPacer, Schedule
from service.rollouts.progress import ProgressLog
from tests import virtual_time
from tests.service.rollouts.playing import (
    KEEP_ALL,
    RandomEnvironment,
    RandomGenerator,
    async_context,
    collect,
    error_of,
    play,
    playing,
    recipes,
    texts,
)
from tests.service.scripted import (
    EpisodeRecipe,
    RecordingChatTokenizer,
    ScriptedEnvironment,
    ScriptedGenerator,
    first_part,
    ids_of,
    outcome,
    user_message,
)

TERMINATING = outcome("O", 1.0, terminated=True)


def episodes_of(recipes_of_request: list[EpisodeRecipe]) -> list[Episode]:
    return [replace(recipe, position=position).make() for position, recipe in enumerate(recipes_of_request)]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (GenerationLost("It died."), {"kind": "generation", "message": "It died.", "retryable": True}),
        (
            ZeroDivisionError("by zero"),
            {"kind": "internal", "message": "ZeroDivisionError: by zero", "retryable": False},
        ),
    ],
)
def test_a_failing_sample_keeps_its_log_and_its_siblings_go_on(failure: Exception, error: dict[str, object]) -> None:
    generator = ScriptedGenerator(["A", failure, "C"])
    results = collect(episodes_of([EpisodeRecipe()] * 3), async_context(generator, ScriptedEnvironment([TERMINATING])))
    assert [results[position].status for position in range(3)] == ["completed", "error", "completed"]
    assert (error_of(results[1]), texts(results[1])) == (error, ["Q"])
    assert sorted(generator.released) == ["request-0-0", "request-1-0", "request-2-0"]


@pytest.mark.parametrize(
    ("failure", "message", "has_traceback"),
    [
        # Where it was noticed it was logged with its traceback already.
        (GenerationRejected("The engine refused the generation: no."), "The engine refused the generation: no.", False),
        (KeyError("x"), "'x'", True),
    ],
)
def test_a_failure_is_logged_once_with_the_names_of_its_rollout(
    failure: Exception, message: str, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    play(EpisodeRecipe(position=3), ScriptedGenerator([failure]), ScriptedEnvironment([]))
    [record] = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "rollout_service.rollouts")
    assert record.getMessage() == f"A sample failed: {message}"
    assert (record.exc_info[1] if record.exc_info else None) is (failure if has_traceback else None)
    names = ("request_id", "rollout_id", "task_name", "sample", "generation_index")
    assert [vars(record)[name] for name in names] == ["request", "request-3-0", "task", 3, 0]


def test_each_task_is_stepped_by_its_own_environment() -> None:
    ours, other = ScriptedEnvironment([TERMINATING]), ScriptedEnvironment([TERMINATING])
    context = RolloutContext(ScriptedGenerator(["A"]), {"other": other, "task": ours}, Schedule())
    collect([EpisodeRecipe().make()], context)
    assert (len(ours.requests), len(other.requests)) == (1, 0)


async def test_closing_a_request_cancels_its_calls_and_releases_its_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(["A"], delay_s=60)
    context = async_context(generator, ScriptedEnvironment([outcome()]))
    async with playing(episodes_of([EpisodeRecipe()] * 4), context, deadline_s=3600) as ended:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(ended), 1)
    assert (generator.cancelled, generator.interrupted, len(generator.released)) == (4, [], 4)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert caplog.records == [], "a client that hangs up is no failure"


async def test_the_timer_of_a_deadline_does_not_outlive_its_request() -> None:
    context = async_context(ScriptedGenerator(["A"]), ScriptedEnvironment([TERMINATING]))
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_later = loop.call_later
    loop.call_later = lambda *args, **options: timers.append(call_later(*args, **options)) or timers[-1]  # type: ignore[method-assign, func-returns-value]
    async with playing(episodes_of([EpisodeRecipe()]), context, deadline_s=3600) as ended:
        assert [each.status async for each in ended] == ["completed"]
    assert [timer.cancelled() for timer in timers] == [True]


@given(st.lists(recipes, max_size=6))
def test_both_schedules_give_the_same_results(recipes_of_request: list[EpisodeRecipe]) -> None:
    lockstep, free = (
        collect(
            episodes_of(recipes_of_request), RolloutContext(RandomGenerator(), {"task": RandomEnvironment()}, schedule)
        )
        for schedule in (LockstepSchedule(), Schedule())
    )
    assert lockstep == free


class Noting:
    """The order in which generations and steps end."""

    def __init__(self, terminates: bool) -> None:
        self.order: list[str] = []
        order = self.order

        class Generator(RandomGenerator):
            async def generate(self, request: GenerationRequest) -> Generation:
                generation = await super().generate(request)
                order.append("generation")
                return generation

        class Environment(ScriptedEnvironment):
            async def step(self, request: StepRequest) -> StepOutcome:
                order.append("step")
                second_turn_of_q = len(request.message_log) > 3 and request.message_log[0]["content"] == "q"
                return outcome("o", terminated=terminates and second_turn_of_q)

        self.context = RolloutContext(Generator(), {"task": Environment([])}, LockstepSchedule())


def test_in_lockstep_all_generate_then_all_step_and_the_finished_drop_out() -> None:
    noting = Noting(terminates=True)
    collect(episodes_of([EpisodeRecipe(prompt, max_rollout_turns=3) for prompt in ("q", "qq", "qqq")]), noting.context)
    first_turns = ["generation"] * 3 + ["step"] * 3
    assert noting.order == first_turns * 2 + ["generation"] * 2 + ["step"] * 2


def test_a_sample_that_begins_with_its_step_stays_with_the_others() -> None:
    noting = Noting(terminates=False)
    unstepped = Message(role="assistant", content="a", token_ids=[97], generation_logprobs=[-1.0], finish_reason="stop")
    resumed = EpisodeRecipe(message_log=lambda _: [user_message("Q"), unstepped], max_rollout_turns=2)
    collect(episodes_of([EpisodeRecipe(max_rollout_turns=2), resumed]), noting.context)
    assert noting.order == ["generation", "step", "step", "generation", "generation", "step", "step"]


@pytest.mark.parametrize(
    ("text", "delay_s", "is_deaf", "kept", "finish_reason"),
    [("abcdefghij", 10, False, "abcd", None), ("ab", 4.5, True, "ab", "stop")],
)
def test_at_the_deadline_a_generation_gives_its_tokens_so_far(
    text: str, delay_s: float, is_deaf: bool, kept: str, finish_reason: str | None
) -> None:
    generator = ScriptedGenerator([text], delay_s=delay_s, ignores_interrupts=is_deaf)
    context = async_context(generator, environment := ScriptedEnvironment([TERMINATING]))
    [result] = collect(episodes_of([EpisodeRecipe()]), context, deadline_s=4).values()
    assert (result.status, texts(result), environment.requests) == ("deadline", ["Q", kept], [])
    assert result.message_log[1].finish_reason == finish_reason
    assert result.metrics.turn_gen_tokens == [len(kept)]


@pytest.mark.parametrize(
    ("keep", "cut"), [(KEEP_ALL, (11.0, "deadline", ["QQ"])), (Keep(per_group=1), (9.0, "cancelled", ["QQ"]))]
)
async def test_tokens_that_do_not_come_are_awaited_5_seconds(keep: Keep, cut: tuple[float, str, list[str]]) -> None:
    generator = ScriptedGenerator(["abcdefghij"], ignores_interrupts=True)
    generator.delay_of = lambda request: 4 if len(request.prompt_token_ids) == 1 else 60
    context = async_context(generator, ScriptedEnvironment([TERMINATING]))
    async with playing(episodes_of([EpisodeRecipe("Q"), EpisodeRecipe("QQ")]), context, keep, deadline_s=6) as ended:
        ends = [(virtual_time.now(), each.status, texts(each.result())) async for each in ended]
    assert ends == [(4.0, "completed", ["Q", "abcdefghij", "O"]), cut]
    assert (generator.interrupted, generator.cancelled) == (["request-1-0"], 1)


async def test_a_result_that_waits_when_its_episode_is_cut_off_is_kept() -> None:
    """All generations end at the same instant, and one goes on in each iteration of the loop."""
    episodes = episodes_of([EpisodeRecipe()] * 10)
    context = async_context(ScriptedGenerator(["ab"], delay_s=4), ScriptedEnvironment([TERMINATING]))
    context = replace(context, pacer=LoopPacer(per_iteration=1))

    running = RunningEpisodes(episodes, context, EarlyStopping(KEEP_ALL, dict.fromkeys(episodes, 0)))
    await virtual_time.until(lambda: context.pacer.is_waiting(episodes[-1]))
    running.cut_off_all("deadline")
    for _ in episodes:
        await running.ended.get()
    assert virtual_time.now() == 4
    await running.stop()
    assert {(episode.status, *texts(episode.result())) for episode in episodes[-8:]} == {("deadline", "Q", "ab")}


async def test_a_lost_journal_does_not_keep_a_request_from_ending() -> None:
    class LostJournal(ProgressLog):
        started, begun_groups = MappingProxyType[int, SampleInput]({}), 0

        async def turn_ended(self, episode: Episode) -> None:
            await asyncio.Event().wait()

    episodes = episodes_of([EpisodeRecipe()] * 2)
    context = async_context(ScriptedGenerator(["ab"]), ScriptedEnvironment([TERMINATING]))
    context = replace(context, progress=LostJournal())  # type: ignore[abstract]
    running = RunningEpisodes(episodes, context, EarlyStopping(KEEP_ALL, dict.fromkeys(episodes, 0)))
    await virtual_time.until(lambda: all(episode.done for episode in episodes))
    async with asyncio.timeout(1):
        await running.stop()


@pytest.mark.parametrize(("retries", "status"), [(0, "error"), (1, "completed")])
def test_a_generation_that_stalls_goes_on_where_it_ended_and_costs_a_retry(retries: int, status: str) -> None:
    class StallsOnce(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            whole = await super().generate(request)
            return first_part(whole, 2, TurnTimedOut("no new token")) if len(self.requests) == 1 else whole

    generator = StallsOnce(["abcd", "ef"])
    result = play(EpisodeRecipe(retries=retries), generator, ScriptedEnvironment([TERMINATING]))
    assert result.status == status
    assert texts(result) == (["Q", "ab"] if retries == 0 else ["Q", "abef", "O"])
    assert (result.error.kind if result.error else None) == ("timeout" if retries == 0 else None)


async def test_a_generation_that_new_weights_cut_goes_on_at_once() -> None:
    class CutTwice(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            whole = await super().generate(request)
            return first_part(whole, 1) if len(self.requests) < 3 else whole

    episode = EpisodeRecipe(retries=0).make()
    await _play_sample(episode, async_context(CutTwice(["ab", "cd", "ef"]), ScriptedEnvironment([TERMINATING])))
    assert texts(episode.result()) == ["Q", "acef", "O"]
    assert virtual_time.now() == 0


@given(seed=st.integers(0, 10_000), size=st.integers(1, 5), deadline_s=st.integers(1, 12))
@virtual_time.synchronous
async def test_episodes_come_out_once_in_time_whatever_is_interrupted(seed: int, size: int, deadline_s: int) -> None:
    draw = random.Random(seed)

    class Uneven(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            self.delay_s, self.ignores_interrupts = draw.randrange(6), draw.random() < 0.3
            return await super().generate(request)

    keep, schedule = Keep(per_group=draw.randint(1, size)), draw.choice([Schedule(), LockstepSchedule()])
    environment = ScriptedEnvironment([TERMINATING, outcome("o")])
    context = RolloutContext(Uneven(["abcdef", GenerationLost("died")]), {"task": environment}, schedule)
    out = []
    async with playing(episodes_of([EpisodeRecipe(max_rollout_turns=3)] * size), context, keep, deadline_s) as ended:
        async for episode in ended:
            assert virtual_time.now() <= deadline_s + Episode.interruption_s
            out.append(episode.identity.position)
    assert sorted(out) == list(range(size))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_deadline_holds_however_slowly_the_results_are_read() -> None:
    class Endless(ScriptedEnvironment):
        async def step(self, request: StepRequest) -> StepOutcome:
            await asyncio.sleep(1)
            return outcome("o")

    episodes = episodes_of([EpisodeRecipe(max_rollout_turns=10_000)] * 3)
    turns = []
    async with playing(episodes, async_context(ScriptedGenerator(["A"]), Endless([])), deadline_s=4.5) as ended:
        async for episode in ended:
            turns.append(episode.result().metrics.turn_count)
            await asyncio.sleep(100)
    assert turns == [5, 5, 5]


@pytest.mark.parametrize(
    ("keep", "statuses"),
    [
        (Keep(per_group=1), ["completed", "cancelled"] * 3),
        (Keep(groups=1), ["completed", "completed", "cancelled", "cancelled", "cancelled", "cancelled"]),
        (Keep(groups=2, per_group=1), ["completed", "cancelled", "completed", "cancelled", "cancelled", "cancelled"]),
    ],
)
def test_rollouts_that_early_stopping_does_not_need_are_cancelled(keep: Keep, statuses: list[str]) -> None:
    episodes = episodes_of([EpisodeRecipe("Q" * (1 + place), group=place // 2) for place in range(6)])
    generator = ScriptedGenerator(["A"], delay_of=lambda request: len(request.prompt_token_ids))
    results = collect(episodes, async_context(generator, ScriptedEnvironment([TERMINATING])), keep)
    assert [results[position].status for position in range(6)] == statuses
    assert (len(generator.interrupted), generator.cancelled) == (statuses.count("cancelled"), 0)


def test_a_call_that_cancels_itself_fails_its_sample_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class CancellingItself(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> Generation:
            raise asyncio.CancelledError

    results = collect([EpisodeRecipe().make()], async_context(CancellingItself([]), ScriptedEnvironment([])))
    message = "A call of the sample was cancelled."
    assert error_of(results[0]) == {"kind": "internal", "message": message, "retryable": True}
    [record] = caplog.records
    assert (record.levelname, vars(record)["rollout_id"], record.getMessage()) == ("WARNING", "request-0-0", message)
    assert (record.exc_info or [None])[0] is asyncio.CancelledError


@pytest.mark.parametrize(("length", "is_inline"), [(MOST_CHARACTERS_INLINE, True), (MOST_CHARACTERS_INLINE + 1, False)])
def test_a_long_observation_is_tokenized_in_another_thread(length: int, is_inline: bool) -> None:
    tokenizer = RecordingChatTokenizer()
    recipe = EpisodeRecipe(max_rollout_turns=1, max_seq_len=length + 100, tokenizer=tokenizer)
    environment = ScriptedEnvironment([outcome("o" * length, reward=1.0)])
    result = play(recipe, ScriptedGenerator(["A"]), environment)
    assert texts(result) == ["Q", "A", "o" * length]
    assert result.message_log[-1].token_ids.tolist() == ids_of("o" * length)  # type: ignore[attr-defined]
    assert [asked.thread == threading.get_ident() for asked in tokenizer.asked] == [is_inline]
