"""Which versions the tokens of a rollout have: the state machine, and laws of whole requests while versions change."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import GenerationLost, PolicyDropped, VersionReplaced
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest, WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.weight_versions import refuse_other_version
from rollout_client.contract.messages import FinishReason, Message, WeightVersionSpan
from rollout_client.contract.rollouts import Keep, SampleResult
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.loop import RolloutContext
from service.rollouts.metrics import STATUSES_WITH_FINAL_REWARD, RequestMetricsAccumulator
from service.rollouts.pacing import Schedule
from service.rollouts.staleness import RolloutVersions, VersionBounds, VersionFeed, _tokens_of_version, oldest_version
from tests import virtual_time
from tests.service.rollouts.playing import KEEP_ALL, error_of, greedy_generation, playing
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, first_part, outcome


def spans(*versions: int) -> tuple[WeightSpan, ...]:
    """One token of each version."""
    return tuple(WeightSpan(str(version), place, place + 1) for place, version in enumerate(versions))


def generation_of(*versions: int) -> Generation:
    return Generation(packed_ids(versions), packed_logprobs([-1.0] * len(versions)), "stop", spans(*versions))


def versions_at(
    current: int | None, *made: int, max_staleness: int | None = 1, version: int | None = None
) -> RolloutVersions:
    """Those of a rollout with tokens of the versions `made`."""
    versions = RolloutVersions(VersionBounds(version, max_staleness, current))
    versions.add(spans(*made))
    return versions


@pytest.mark.parametrize(
    ("current", "made", "max_staleness", "is_stale"),
    [(8, (9, 7), 1, False), (8, (8, 6, 9), 1, True), (1000, (1,), None, False), (None, (1,), 0, False)],
)
def test_a_rollout_is_stale_by_its_oldest_token(
    current: int | None, made: tuple[int, ...], max_staleness: int | None, is_stale: bool
) -> None:
    assert versions_at(current, *made, max_staleness=max_staleness).is_stale == is_stale


def test_versions_of_a_named_policy_are_those_of_its_label() -> None:
    versions = RolloutVersions(VersionBounds(max_staleness=1, current=8, policy="run-b"))
    versions.add([WeightSpan("run-b/8", 0, 1), WeightSpan("run-b/6", 1, 2)])
    assert versions.is_stale
    versions = RolloutVersions(VersionBounds(7, None, 7, policy="run-b"))
    labels = (WeightSpan("run-b/7", 0, 2), WeightSpan("run-b/8", 2, 3))
    part = versions.demanded_part(Generation(packed_ids([1, 2, 3]), packed_logprobs([0.0] * 3), "stop", labels))
    assert (len(part.token_ids), part.finish_reason, part.weight_versions) == (2, "abort", labels[:1])


def test_a_posted_log_counts_with_the_tokens_that_its_policy_generated() -> None:
    log = [generated_by("1"), generated_by("run-a/2"), generated_by("10", "run-b/9"), generated_by("run-b/7")]
    assert [oldest_version(log, policy) for policy in (None, "run-a", "run-b", "run-c")] == [1, 2, 7, None]
    said = generated_by("1").model_copy(update={"role": "user", "generation_logprobs": None})
    assert [oldest_version(log) for log in ([said], [generated_by()], [generated_by("10", "9")])] == [None, None, 9]


def test_a_rollout_of_a_dropped_policy_asks_for_no_generation() -> None:
    bounds = VersionBounds(policy="run-b", current=7)
    versions = RolloutVersions(bounds)
    assert bounds.note_current(None) is None
    with pytest.raises(PolicyDropped, match="The policy run-b was dropped, or other full weights took the place"):
        versions.begin_generation()
    bounds.note_current(8)
    versions.begin_generation()


def test_the_current_version_never_goes_back() -> None:
    bounds = VersionBounds()
    assert [bounds.note_current(version) for version in (3, 3, 5, 4)] == [None, None, 3, None]
    assert bounds.current == 5


@pytest.mark.parametrize(("made", "at_end"), [((7, 5, 8), 3), ((9,), 0)])
def test_the_staleness_at_the_end_is_that_of_the_oldest_token_and_stays(made: tuple[int, ...], at_end: int) -> None:
    versions = versions_at(8, *made, max_staleness=None)
    assert versions.at_end is None
    versions.note_end()
    versions.bounds.note_current(9)
    assert versions.at_end == at_end


def test_a_generation_is_interrupted_once_its_first_token_may_be_stale() -> None:
    versions = versions_at(4)
    versions.begin_generation()
    for current in (5, 6, 7):
        before = versions.bounds.note_current(current)
        assert before is not None
        assert not versions.must_interrupt(before, is_at_replica=False)
    # It was sent while version 7 was current.
    assert versions.bounds.note_current(8) == 7
    assert not versions.must_interrupt(before=7, is_at_replica=True)
    assert versions.bounds.note_current(9) == 8
    assert versions.must_interrupt(before=8, is_at_replica=True)
    # Of the next one nothing is known.
    versions.begin_generation()
    assert not versions.must_interrupt(before=8, is_at_replica=True)


def test_a_rollout_of_an_exact_version_generates_with_no_other() -> None:
    versions = versions_at(7, version=7, max_staleness=None)
    versions.begin_generation()
    versions.bounds.note_current(8)
    assert versions.must_interrupt(before=7, is_at_replica=False)
    with pytest.raises(VersionReplaced) as raised:
        versions.begin_generation()
    assert (raised.value.kind, raised.value.retryable) == ("policy", False)
    assert str(raised.value) == (
        "Version 7 must generate every token of the rollout, and version 8 took its place before the rollout had "
        "ended. Demand another version, or push new weights when rollouts have ended."
    )


@pytest.mark.parametrize(("made", "kept"), [((7, 7, 7), 3), ((7, 7, 8), 2), ((8, 7, 7), 0), ((7, 8, 7), 1), ((), 0)])
def test_only_the_tokens_before_those_of_another_version_count(made: tuple[int, ...], kept: int) -> None:
    assert _tokens_of_version(spans(*made), "7") == kept
    generation = generation_of(*made)
    part = versions_at(7, version=7).demanded_part(generation)
    assert part == (generation if kept == len(made) else replace(generation_of(*made[:kept]), finish_reason="abort"))
    assert (part is generation) == (kept == len(made))


@dataclass
class World(VersionFeed):
    """A policy whose versions become current at given moments; replicas have each one `ahead_s` seconds before."""

    versions: Sequence[int]
    """The first is current from the beginning."""
    moments: Sequence[float]
    """When each further one becomes current."""
    ahead_s: float = 0.0
    current: int = field(init=False)
    on_version: Callable[[int], None] | None = None
    published: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.versions[0]

    @property
    def loaded(self) -> int:
        """By the replicas."""
        return self.versions[sum(moment - self.ahead_s <= virtual_time.now() for moment in self.moments)]

    def subscribe(self, on_version: Callable[[int], None], policy: str | None = None) -> Callable[[], None]:
        self.on_version = on_version
        on_version(self.current)

        def unsubscribe() -> None:
            self.on_version = None

        return unsubscribe

    async def run(self) -> None:
        for version, moment in zip(self.versions[1:], self.moments, strict=True):
            await asyncio.sleep(moment - virtual_time.now())
            self.current = version
            self.published.append((virtual_time.now(), version))
            if self.on_version is not None:
                self.on_version(version)


class TimedGenerator(ScriptedGenerator):
    """Makes a token each second, with the weights that replicas have at that moment; it decodes greedily."""

    def __init__(self, world: World) -> None:
        super().__init__(script=[])
        self.world = world

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        refuse_other_version(request, self.world.loaded)
        whole = greedy_generation(request)
        interrupted = self.interrupts[request.rollout_id] = asyncio.Event()
        made = list[int]()
        try:
            while len(made) < len(whole.token_ids):
                try:
                    await asyncio.wait_for(interrupted.wait(), 1.0)
                except TimeoutError:
                    made.append(self.world.loaded)
                else:
                    return replace(first_part(whole, len(made)), weight_versions=spans(*made))
        finally:
            del self.interrupts[request.rollout_id]
        return replace(whole, weight_versions=spans(*made))


class SlowEnvironment(ScriptedEnvironment):
    """Takes up to three seconds for a step, and ends a fifth of the rollouts with each."""

    async def step(self, request: StepRequest) -> StepOutcome:
        draw = random.Random(repr(request.message_log))
        await asyncio.sleep(draw.randrange(4))
        return outcome("xy", reward=1.0, terminated=draw.random() < 0.2)


Ended = list[tuple[float, Episode, SampleResult]]


@virtual_time.synchronous
async def play_in(world: World, episodes: list[Episode], keep: Keep = KEEP_ALL) -> tuple[Ended, TimedGenerator]:
    """Each episode with the moment of its end."""
    generator = TimedGenerator(world)
    context = RolloutContext(generator, {"task": SlowEnvironment([])}, Schedule(), versions=world)
    publishing = asyncio.create_task(world.run())
    async with playing(episodes, context, keep) as ended:
        results = [(virtual_time.now(), episode, episode.result()) async for episode in ended]
    publishing.cancel()
    await virtual_time.settled()
    assert world.on_version is None, "the subscription has ended with the request"
    return results, generator


def versions_of(result: SampleResult) -> list[int]:
    """The version of each generated token."""
    return [
        int(span.version)
        for message in result.message_log
        for span in message.weight_versions or ()
        for _ in range(span.start, span.end)
    ]


def episodes_with(bounds: VersionBounds, count: int) -> list[Episode]:
    recipe = EpisodeRecipe(max_seq_len=60, max_new_tokens=8, max_rollout_turns=6, bounds=bounds)
    return [replace(recipe, prompt="qrst"[at % 4] * (1 + at), position=at).make() for at in range(count)]


# No two moments are whole seconds apart, so that no token is made in the moment in which a version becomes current.
worlds = st.builds(
    lambda steps, gaps: World(
        list(accumulate(steps, initial=3)),
        [moment - 0.5 + place / 100 for place, moment in enumerate(accumulate(gaps))],
    ),
    steps=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    gaps=st.lists(st.integers(1, 6), min_size=8, max_size=8),
)


@given(worlds, st.integers(0, 4), st.integers(1, 8))
def test_a_rollout_ends_when_it_becomes_stale(world: World, max_staleness: int, count: int) -> None:
    ended, generator = play_in(world, episodes_with(VersionBounds(max_staleness=max_staleness), count))
    assert len(ended) == count
    metrics = RequestMetricsAccumulator()
    final = RequestMetricsAccumulator()
    for moment, episode, result in ended:
        made, staleness = versions_of(result), episode.versions.at_end
        metrics.add(result, staleness)
        if result.status == "stale":
            assert made
            [became_stale_at, *_] = [at for at, version in world.published if version - min(made) > max_staleness]
            assert moment == became_stale_at
        else:
            final.add(result, staleness)
            assert result.status in STATUSES_WITH_FINAL_REWARD
            assert staleness == (world_version_at(world, moment) - min(made) if made else None)
            assert staleness is None or staleness <= max_staleness
        assert not made or max(made) - min(made) <= max_staleness
        assert all(span.end > span.start for message in result.message_log for span in message.weight_versions or ())
    stale = sum(result.status == "stale" for _, _, result in ended)
    expected = final.metrics() | {"stale_rate": stale / count} if stale < count else metrics.metrics()
    assert metrics.metrics() == expected
    assert generator.interrupts == {}


def world_version_at(world: World, moment: float) -> int:
    return max([world.versions[0], *(version for at, version in world.published if at <= moment)])


@given(worlds, st.integers(1, 8), st.sampled_from([0.0, 1.0, 3.0]))
def test_every_token_of_a_rollout_of_an_exact_version_is_of_it(world: World, count: int, ahead_s: float) -> None:
    world.ahead_s = ahead_s
    demanded = world.versions[0]
    ended, _ = play_in(world, episodes_with(VersionBounds(version=demanded), count))
    assert len(ended) == count
    for _, _, result in ended:
        assert set(versions_of(result)) <= {demanded}
        if result.status == "error":
            assert error_of(result) | {"message": ""} == {"kind": "policy", "message": "", "retryable": False}
            assert world.current > demanded
        else:
            assert result.status in STATUSES_WITH_FINAL_REWARD


def generated_by(*labels: str, finish_reason: FinishReason | None = None) -> Message:
    """A response with a token of each of these versions."""
    versions = [WeightVersionSpan(version=label, start=at, end=at + 1) for at, label in enumerate(labels)]
    response = Message(role="assistant", content="a", token_ids=[97], generation_logprobs=[-1.0])
    return response.model_copy(update={"weight_versions": versions or None, "finish_reason": finish_reason})


def test_stale_rollouts_do_not_count_for_early_stopping() -> None:
    bounds = VersionBounds(max_staleness=0)
    stale = EpisodeRecipe(message_log=lambda _: [generated_by("3")], bounds=bounds)
    short = EpisodeRecipe(prompt="qq", bounds=bounds, position=2, max_rollout_turns=1)
    long = EpisodeRecipe(prompt="qqq", bounds=bounds, position=3, max_rollout_turns=1)
    ended, _ = play_in(World([4], []), [recipe.make() for recipe in (stale, short, long)], Keep(per_group=1))
    first, second, third = (result.status for _, _, result in ended)
    assert (first, second in STATUSES_WITH_FINAL_REWARD, third) == ("stale", True, "cancelled")


@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_posted_log_that_is_stale_already_is_not_played(finish_reason: FinishReason | None) -> None:
    log = [generated_by("1", finish_reason=finish_reason)]
    episode = EpisodeRecipe(message_log=lambda _: log, bounds=VersionBounds(max_staleness=1)).make()
    [(moment, _, result)], generator = play_in(World([3], []), [episode])
    assert (moment, result.status, generator.requests) == (0.0, "stale", [])
    assert generator.released == [episode.identity.rollout_id]


def test_what_ends_a_rollout_after_it_has_become_stale_leaves_it_stale() -> None:
    bounds = VersionBounds(max_staleness=0, current=3)
    ending_with_step, ending_with_generation = (EpisodeRecipe(bounds=bounds, max_new_tokens=2).make() for _ in range(2))
    for episode in (ending_with_step, ending_with_generation):
        assert episode.next_generation() is not None
    ending_with_step.add_generation(generation_of(3, 3))
    assert not ending_with_step.done
    bounds.note_current(4)
    ending_with_step.add_outcome(outcome(reward=1.0, terminated=True))
    ending_with_generation.add_generation(generation_of(3, 3))
    assert [episode.status for episode in (ending_with_step, ending_with_generation)] == ["stale", "stale"]


def test_tokens_without_a_version_are_lost_where_one_is_demanded() -> None:
    unlabelled = Generation(packed_ids([97]), packed_logprobs([-1.0]), "stop")
    with pytest.raises(GenerationLost, match="did not say which version"):
        versions_at(7, version=7).demanded_part(unlabelled)
    assert versions_at(7).demanded_part(unlabelled) is unlabelled
