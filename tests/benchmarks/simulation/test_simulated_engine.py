"""The simulated engine: what it generates, and when."""

import asyncio
import math
from dataclasses import replace

import pytest

from benchmarks.simulation.simulated_engine import SimulatedEngine
from benchmarks.simulation.timing import Timing
from deployments.failures import GenerationRejected, ReplicaShuttingDown, RolloutFailure
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.protocols.images import ImageSpan
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from tests import virtual_time
from tests.paths import TINY_MODEL
from tests.virtual_time import now, run, settled

LETTERS = [65, 66, 67]
ONE_AT_A_TIME = Timing(time_to_first_token_s=1.0, time_per_token_s=0.5, max_num_seqs=1)


def engine(timing: Timing = ONE_AT_A_TIME) -> SimulatedEngine:
    return SimulatedEngine(timing, GeneratorDescription("m", max_model_len=64, vocab_size=70), LETTERS)


def request(name: str, tokens: int, prompt: list[int] | None = None, seed: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, prompt or [0], tokens, (), SamplingOptions(seed=seed))


def test_a_generation_has_max_new_tokens_letters_and_ends_by_length() -> None:
    generation = run(engine().generate(request("a", 5, prompt=[1, 3])))
    assert list(generation.token_ids) == [66, 67, 65, 66, 67]
    assert generation.logprobs == packed_logprobs([-math.log(3)] * 5)
    assert generation.finish_reason == "length"
    assert generation.weight_versions == (WeightSpan("0", 0, 5),)


def test_a_prompt_that_shows_an_image_is_refused_as_by_a_model_that_sees_none() -> None:
    shows = replace(request("a", 5, prompt=[1, 3]), images=(ImageSpan("sha256:0", 0, 1),))
    with pytest.raises(GenerationRejected, match="The model takes no images, and 1 are shown to it"):
        run(engine().generate(shows))


def test_token_ids_depend_on_prompt_and_seed_alone() -> None:
    async def first_ids() -> list[int]:
        simulated = engine(Timing())
        asked = [request("a", 1, [1]), request("b", 1, [1]), request("c", 1, [2]), request("d", 1, [1], seed=2)]
        return [(await simulated.generate(each)).token_ids[0] for each in asked]

    assert run(first_ids()) == [66, 66, 67, 65]


def test_the_longest_generation_is_whole_whichever_letter_it_begins_with() -> None:
    longest = run(engine(Timing()).generate(request("a", 64, prompt=[2])))
    assert list(longest.token_ids) == [LETTERS[(2 + place) % 3] for place in range(64)]


def test_with_a_spread_generations_are_shorter_by_up_to_that_part_as_prompt_and_seed_decide() -> None:
    simulated = engine(Timing(length_spread=0.5))
    drawn = [run(simulated.generate(request("a", 20, seed=seed))) for seed in range(200)]
    lengths = [len(generation.token_ids) for generation in drawn]
    assert set(lengths) == set(range(10, 21))
    assert {generation.finish_reason for generation in drawn if len(generation.token_ids) < 20} == {"stop"}
    assert lengths == [len(run(simulated.generate(request("b", 20, seed=seed))).token_ids) for seed in range(200)]


def test_the_tokens_are_the_letters_of_the_models_vocabulary() -> None:
    simulated = SimulatedEngine.start(Timing(), str(TINY_MODEL), None, max_model_len=100)
    described = GeneratorDescription(
        str(TINY_MODEL), 100, vocab_size=262, engine="simulated", max_num_seqs=256, settings_hash="simulated"
    )
    assert simulated.describe() == described
    everything = set(run(simulated.generate(request("a", 100))).token_ids)
    assert everything == {ord(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"}


def test_generations_that_may_not_run_at_once_end_one_after_the_other() -> None:
    async def ends() -> dict[str, float]:
        simulated, ended = engine(), dict[str, float]()

        async def one(name: str, tokens: int) -> None:
            await simulated.generate(request(name, tokens))
            ended[name] = now()

        await asyncio.gather(one("a", 2), one("b", 4), one("c", 2))
        return ended

    assert run(ends()) == {"a": 2.0, "b": 5.0, "c": 7.0}


def test_a_shorter_generation_ends_before_a_longer_one_that_started_earlier() -> None:
    async def order() -> list[str]:
        simulated, ended = engine(Timing(time_per_token_s=1.0)), list[str]()

        async def one(name: str, tokens: int) -> None:
            await simulated.generate(request(name, tokens))
            ended.append(name)

        await asyncio.gather(one("long", 9), one("short", 2), one("middle", 5))
        return ended

    assert run(order()) == ["short", "middle", "long"]


@virtual_time.test
async def test_with_both_times_0_a_generation_returns_without_a_pass_of_the_event_loop() -> None:
    with pytest.raises(StopIteration):
        engine(Timing()).generate(request("a", 3)).send(None)


def test_cancelling_a_generation_starts_the_next_one_and_leaves_none_ongoing() -> None:
    async def waited() -> float:
        simulated = engine()
        cancelled, waiting = (asyncio.create_task(simulated.generate(request(name, 2))) for name in "ab")
        await settled()
        assert simulated.load() == ReplicaLoad(2, waiting_generations=1, kv_tokens=2 * (1 + 2))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        await waiting
        assert simulated.load() == ReplicaLoad(0, waiting_generations=0, kv_tokens=0)
        return now()

    assert run(waited()) == 2.5


def interrupted_at(seconds: float, *names: str, failure: RolloutFailure | None = None) -> dict[str, Generation]:
    """Two generations of four tokens, one after the other; those named are interrupted after a while."""

    async def steps() -> dict[str, Generation]:
        simulated = engine()
        running = {name: asyncio.create_task(simulated.generate(request(name, 4))) for name in "ab"}
        await asyncio.sleep(seconds)
        await simulated.interrupt([*names, "unknown"], failure)
        results = {name: await task for name, task in running.items()}
        assert simulated.load() == ReplicaLoad(0, 0, 0)
        return results

    return run(steps())


@pytest.mark.parametrize(("seconds", "tokens"), [(0.5, 0), (1.0, 0), (1.4, 0), (1.5, 1), (2.6, 3)])
def test_an_interrupted_generation_gives_the_tokens_for_which_time_has_passed(seconds: float, tokens: int) -> None:
    failure = ReplicaShuttingDown("gone")
    results = interrupted_at(seconds, "a", failure=failure)
    whole = run(engine().generate(request("a", 4)))
    assert results["a"] == Generation(
        whole.token_ids[:tokens],
        whole.logprobs[:tokens],
        "abort",
        (WeightSpan("0", 0, tokens),) if tokens else (),
        failure,
    )
    assert results["b"].finish_reason == "length", "the other one goes on"


def test_a_generation_that_is_interrupted_while_it_waits_has_no_token() -> None:
    results = interrupted_at(2.9, "b")
    assert (len(results["b"].token_ids), results["b"].finish_reason, results["b"].failure) == (0, "abort", None)
    assert (len(results["a"].token_ids), results["a"].finish_reason) == (4, "length")


def test_interrupting_a_running_generation_starts_the_next_one() -> None:
    async def waited() -> float:
        simulated = engine()
        first, second = (asyncio.create_task(simulated.generate(request(name, 4))) for name in "ab")
        await asyncio.sleep(1)
        await simulated.interrupt(["a"])
        await asyncio.gather(first, second)
        return now()

    assert run(waited()) == 4


def test_a_prompt_is_scored_as_letters_drawn_with_equal_probabilities() -> None:
    asked = ScoringRequest("a", [5, 6, 7], 1, (), SamplingOptions(), top_k=2, start=1)
    third = -math.log(3)
    assert run(engine().generate(asked)) == ScoredPrompt(
        packed_ids(()),
        packed_logprobs(()),
        "length",
        prompt_logprobs=packed_logprobs([third] * 2),
        top_token_ids=packed_ids([65, 66] * 2),
        top_logprobs=packed_logprobs([third] * 4),
        weight_version="0",
    )
