"""Programs of agents: what is drawn, what a prompt has to compute, and which bounds are missed."""

import asyncio

import pytest

from benchmarks.agents.program_figures import (
    Program,
    compulsory_tokens,
    figures_of,
    looked_up_and_found,
    medians,
    missed,
    ratios_of,
)
from benchmarks.agents.slow_tools import AnswersToCome, SlowTools

METRICS = """
ray_vllm_prefix_cache_queries_total{engine="0",ReplicaId="a"} 2048.0
ray_vllm_prefix_cache_queries_total{engine="0",ReplicaId="b"} 1.0e+03
ray_vllm_prefix_cache_hits_total{engine="0",ReplicaId="a"} 512.0
ray_vllm_external_prefix_cache_queries_total{engine="0",ReplicaId="a"} 1536.0
ray_vllm_external_prefix_cache_hits_total{engine="0",ReplicaId="a"} 128.0
"""


def test_programs_are_repeatable_and_no_two_begin_alike() -> None:
    one, again, other = (SlowTools().example_samples(4, seed, turns=3) for seed in (1, 1, 2))
    assert one == again
    assert len({tuple(sample["message_log"][0]["token_ids"][:32]) for sample in (*one, *other)}) == 8
    assert [len(sample["extra_env_info"]["answers"]) for sample in one] == [2] * 4


def test_a_tool_answers_its_tokens_and_the_last_turn_ends_the_program() -> None:
    first = asyncio.run(SlowTools().step([], AnswersToCome(answers=[(0.0, 5), (1.0, 7)])))
    assert (first.observations[0]["content"], first.metadata) == (".....", {"answers": [[1.0, 7]]})
    assert asyncio.run(SlowTools().step([], AnswersToCome(answers=[]))).terminated


def test_tokens_of_a_connector_are_found() -> None:
    assert looked_up_and_found(METRICS) == (3048, 640)


@pytest.mark.parametrize(("prompts", "tokens"), [([1000], 1000), ([97, 400], 497 - 128), ([96, 400], 496)])
def test_whole_blocks_of_the_turn_before_are_known(prompts: list[int], tokens: int) -> None:
    assert compulsory_tokens(Program(1.0, prompts)) == tokens


def test_bounds_depend_on_the_cache_and_the_tools() -> None:
    programs = [Program(seconds, [1000, 1400]) for seconds in (10.0, 20.0)]
    today, places = figures_of(programs, 4800), figures_of([each._replace(seconds=10.0) for each in programs], 3200)
    assert today == {
        "recomputed_tokens": 2048, "turns_per_s": 0.2, "mean_s": 15.0, "slowest_s": 20.0, "fairness": 0.9,
    }  # fmt: skip
    ratios = medians([ratios_of(places, today)])
    assert missed(ratios, cache=0.3, tool_times=1.0) == []
    assert missed(ratios | {"turns_per_s": 1.0}, cache=0.3, tool_times=4.0) == []
    slow = missed(ratios | {"turns_per_s": 1.0, "recomputed_tokens": 0.6, "slowest_s": 1.6}, cache=0.3, tool_times=1.0)
    assert [problem.split(":")[0] for problem in slow] == ["recomputed_tokens", "turns_per_s", "slowest_s"]
    assert len(missed(ratios | {"turns_per_s": 0.97}, cache=1.0, tool_times=1.0)) == 1
