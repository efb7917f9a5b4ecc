"""The simulated engine: what it generates, and when."""

import asyncio
import math

import pytest

from deployments.protocols import (
    GenerationRequest,
    GeneratorDescription,
    ReplicaLoad,
    SamplingOptions,
    WeightSpan,
    packed_logprobs,
)
from deployments.simulation.simulated_engine import SimulatedEngine
from deployments.simulation.timing import Timing
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


def test_token_ids_depend_on_prompt_and_seed_alone() -> None:
    async def first_ids() -> list[int]:
        simulated = engine(Timing())
        asked = [request("a", 1, [1]), request("b", 1, [1]), request("c", 1, [2]), request("d", 1, [1], seed=2)]
        return [(await simulated.generate(each)).token_ids[0] for each in asked]

    assert run(first_ids()) == [66, 66, 67, 65]


def test_the_longest_generation_is_whole_whichever_letter_it_begins_with() -> None:
    longest = run(engine(Timing()).generate(request("a", 64, prompt=[2])))
    assert list(longest.token_ids) == [LETTERS[(2 + place) % 3] for place in range(64)]


def test_the_tokens_are_the_letters_of_the_models_vocabulary() -> None:
    simulated = SimulatedEngine.start(Timing(), str(TINY_MODEL), None, max_model_len=100)
    assert simulated.describe() == GeneratorDescription(str(TINY_MODEL), max_model_len=100, vocab_size=262)
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


def test_with_both_times_0_a_generation_returns_without_a_pass_of_the_event_loop() -> None:
    async def steps() -> None:
        with pytest.raises(StopIteration):
            engine(Timing()).generate(request("a", 3)).send(None)

    run(steps())


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
