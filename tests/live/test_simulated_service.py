"""What the scale benchmark builds on: its environment, its configs, and how it reads growth."""

import asyncio

from benchmarks.scale import growth
from benchmarks.scale_service import with_scheduling, with_timing
from benchmarks.three_tokens import THREE_TOKENS, Nothing, ThreeTokens
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions
from service.startup.config import read_config
from tests.paths import REPOSITORY, TINY_MODEL


def test_the_environment_answers_three_tokens_and_never_terminates() -> None:
    outcome = asyncio.run(ThreeTokens().step([{"role": "assistant", "content": "anything"}], Nothing()))
    tokens = TransformersChatTokenizer.load(str(TINY_MODEL))
    [observed] = tokens.observations(outcome.observations, [], ChatOptions(observation_format="raw"), room=100)
    assert (len(observed.token_ids), observed.content) == (3, THREE_TOKENS)
    assert (outcome.terminated, outcome.reward, outcome.metadata) == (False, 0.0, None)


def test_another_timing_and_number_of_replicas_leave_the_original_config_unchanged() -> None:
    config = read_config(REPOSITORY / "serve_config.scale.yaml")
    changed = with_timing(config, {"max_num_seqs": 32}, replicas=1)
    generators = [
        (application.args["engine"]["simulated"]["max_num_seqs"], deployment.num_replicas)
        for [application] in (changed.applications, config.applications)
        for deployment in application.deployments
        if deployment.name == "Generator"
    ]
    assert generators == [(32, 1), (1024, 4)]


def test_another_scheduling_leaves_the_original_config_unchanged() -> None:
    config = read_config(REPOSITORY / "serve_config.scale.yaml")
    changed = with_scheduling(config, {"window_factor": None})
    assert changed.applications[0].args["scheduling"] == {"window_factor": None}
    assert "scheduling" not in config.applications[0].args


def test_growth_is_read_from_the_middle_of_what_was_held_before_and_after_the_half() -> None:
    assert growth([100, 108, 104, 112, 104, 110]) == (110 - 104) / 3
    assert growth([100, 150, 100, 150]) == 0
