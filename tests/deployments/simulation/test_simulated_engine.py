"""The engine that only keeps a pace: what it answers, when, and what becomes of weights that are pushed to it."""

import asyncio
import math
from pathlib import Path

import pytest

from deployments.policy.failures import WeightsRefused
from deployments.policy.records import ReplicaRegistration
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.protocols import GenerationRequest, GeneratorDescription, SamplingOptions, WeightSpan, packed_logprobs
from deployments.simulation.simulated_engine import SimulatedEngine
from deployments.simulation.simulated_generator_replica import NO_WEIGHTS, refuse_weights
from deployments.simulation.timing import Timing
from rollout_client.policy_contract import PushOptions
from tests.conftest import TINY_MODEL
from tests.deployments.policy.scripted_replicas import ScriptedCluster, ScriptedReplica
from tests.virtual_time import now, run, settled

LETTERS = [65, 66, 67]
ONE_AT_A_TIME = Timing(time_to_first_token_s=1.0, time_per_token_s=0.5, max_num_seqs=1)


def engine(pace: Timing = ONE_AT_A_TIME) -> SimulatedEngine:
    return SimulatedEngine(pace, GeneratorDescription("m", max_model_len=64, vocab_size=70), LETTERS)


def request(name: str, tokens: int, prompt: list[int] | None = None, seed: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, prompt or [0], tokens, (), SamplingOptions(seed=seed))


def test_a_response_has_all_tokens_it_may_have_and_ends_by_length() -> None:
    generation = run(engine().generate(request("a", 5, prompt=[1, 3])))
    assert list(generation.token_ids) == [66, 67, 65, 66, 67]
    assert generation.logprobs == packed_logprobs([-math.log(3)] * 5)
    assert generation.finish_reason == "length"
    assert generation.weight_versions == (WeightSpan("0", 0, 5),)


def test_ids_follow_from_prompt_and_seed_alone() -> None:
    async def first_ids() -> list[int]:
        paced = engine(Timing())
        asked = [request("a", 1, [1]), request("b", 1, [1]), request("c", 1, [2]), request("d", 1, [1], seed=2)]
        return [(await paced.generate(each)).token_ids[0] for each in asked]

    assert run(first_ids()) == [66, 66, 67, 65]


def test_the_longest_response_fits_wherever_it_begins() -> None:
    longest = run(engine(Timing()).generate(request("a", 64, prompt=[2])))
    assert list(longest.token_ids) == [LETTERS[(2 + place) % 3] for place in range(64)]


def test_the_letters_of_the_model_are_tokens_of_it() -> None:
    paced = SimulatedEngine.start(Timing(), str(TINY_MODEL), None, max_model_len=100)
    assert paced.describe() == GeneratorDescription(str(TINY_MODEL), max_model_len=100, vocab_size=262)
    everything = set(run(paced.generate(request("a", 100))).token_ids)
    assert everything == {ord(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"}


def test_generations_end_at_their_pace_one_after_the_other() -> None:
    async def ends() -> dict[str, float]:
        paced, ended = engine(), dict[str, float]()

        async def one(name: str, tokens: int) -> None:
            await paced.generate(request(name, tokens))
            ended[name] = now()

        await asyncio.gather(one("a", 2), one("b", 4), one("c", 2))
        return ended

    assert run(ends()) == {"a": 2.0, "b": 5.0, "c": 7.0}


def test_one_that_is_shorter_than_those_under_way_ends_before_them() -> None:
    async def order() -> list[str]:
        paced, ended = engine(Timing(time_per_token_s=1.0)), list[str]()

        async def one(name: str, tokens: int) -> None:
            await paced.generate(request(name, tokens))
            ended.append(name)

        await asyncio.gather(one("long", 9), one("short", 2), one("middle", 5))
        return ended

    assert run(order()) == ["short", "middle", "long"]


def test_without_times_a_generation_is_there_at_once() -> None:
    async def steps() -> None:
        # Nothing is waited for: not even one pass of the loop.
        with pytest.raises(StopIteration):
            engine(Timing()).generate(request("a", 3)).send(None)

    run(steps())


def test_cancelling_makes_room_and_leaves_nothing_behind() -> None:
    async def waited() -> float:
        paced = engine()
        cancelled, waiting = (asyncio.create_task(paced.generate(request(name, 2))) for name in "ab")
        await settled()
        assert paced.ongoing_generations == 2
        await asyncio.sleep(0.5)
        cancelled.cancel()
        await waiting
        assert paced.ongoing_generations == 0
        return now()

    assert run(waited()) == 2.5


def test_pushed_weights_are_refused_by_a_sentence_and_version_0_goes_on(tmp_path: Path) -> None:
    async def push() -> None:
        cluster = ScriptedCluster()
        store = PolicyStore(PolicySettings(folder=str(tmp_path)), str(TINY_MODEL), cluster)
        replica = ScriptedReplica("paced", store, cluster)
        refusing = asyncio.create_task(refuse_weights(store, ReplicaRegistration("paced", replica, 1)))
        await settled()
        data = (TINY_MODEL / "model.safetensors").read_bytes()
        sender = await store.begin_chunk(1, 0)
        await store.write_chunk(1, sender, 0, data)
        await store.end_chunk(1, sender, len(data), len(data))
        with pytest.raises(WeightsRefused, match=NO_WEIGHTS):
            await store.complete_upload(1, sender, PushOptions(), False, None)
        state = await store.state(0.0)
        assert (state.current, [(member.replica_id, member.version) for member in state.replicas]) == (
            0,
            [("paced", 0)],
        )
        assert cluster.killed == []
        refusing.cancel()

    run(push())
