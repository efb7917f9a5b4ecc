"""The simulated engine: what it generates, and when."""

import asyncio
import math

import pytest

from benchmarks.simulation.simulated_engine import SimulatedEngine
from benchmarks.simulation.timing import Timing
from deployments.failures import ReplicaShuttingDown, RolloutFailure
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions, WeightSpan, packed_logprobs
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from tests.virtual_time import now, run, settled, synchronous

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


async def test_token_ids_depend_on_prompt_and_seed_alone() -> None:
    simulated = engine(Timing())
    asked = [request("a", 1, [1]), request("b", 1, [1]), request("c", 1, [2]), request("d", 1, [1], seed=2)]
    assert [(await simulated.generate(each)).token_ids[0] for each in asked] == [66, 66, 67, 65]


async def test_cancelling_a_generation_starts_the_next_one() -> None:
    simulated = engine()
    cancelled, waiting = (asyncio.create_task(simulated.generate(request(name, 2))) for name in "ab")
    await settled()
    assert simulated.load() == ReplicaLoad(2, waiting_generations=1, kv_tokens=2 * (1 + 2))
    await asyncio.sleep(0.5)
    cancelled.cancel()
    await waiting
    assert simulated.load() == ReplicaLoad(0, waiting_generations=0, kv_tokens=0)
    assert now() == 2.5


@synchronous
async def interrupted_at(seconds: float, *names: str, failure: RolloutFailure | None = None) -> dict[str, Generation]:
    """Two generations of four tokens, one after the other; those named are interrupted after a while."""
    simulated = engine()
    running = {name: asyncio.create_task(simulated.generate(request(name, 4))) for name in "ab"}
    await asyncio.sleep(seconds)
    await simulated.interrupt([*names, "unknown"], failure)
    results = {name: await task for name, task in running.items()}
    assert simulated.load() == ReplicaLoad(0, 0, 0)
    return results


@pytest.mark.parametrize(("seconds", "tokens"), [(0.5, 0), (1.0, 0), (1.4, 0), (1.5, 1), (2.6, 3)])
def test_an_interrupted_generation_gives_the_tokens_so_far(seconds: float, tokens: int) -> None:
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
