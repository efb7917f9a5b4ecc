"""Logs, rewards and metrics of random episodes are those of the reference implementation, without exceptions."""

from dataclasses import replace

from hypothesis import event, given

from rollout_client.contract.rollouts import SampleMetrics, SampleResult
from tests import virtual_time
from tests.service.rollouts.playing import RandomEnvironment, RandomGenerator, play, recipes
from tests.service.rollouts.reference_loop import ReferenceSample, reference_rollout
from tests.service.scripted import EpisodeRecipe

raw_recipes = recipes.map(lambda recipe: replace(recipe, observation_format="raw"))


def reference(recipe: EpisodeRecipe) -> ReferenceSample:
    return virtual_time.run(reference_rollout(recipe, RandomGenerator(), RandomEnvironment()))


def assert_equal(result: SampleResult, expected: ReferenceSample) -> None:
    assert [(message.role, list(message.token_ids)) for message in result.message_log] == expected.log
    responses = [message for message in result.message_log if message.generation_logprobs is not None]
    assert [list(message.generation_logprobs or ()) for message in responses] == expected.logprobs
    assert result.total_reward == expected.total_reward
    assert result.metrics == SampleMetrics(
        turn_count=len(expected.turn_gen_tokens),
        total_tokens=sum(expected.turn_gen_tokens) + expected.env_tokens,
        assistant_tokens=sum(expected.turn_gen_tokens),
        env_tokens=expected.env_tokens,
        terminated=expected.terminated,
        truncated=expected.truncated,
        max_turns_reached=expected.max_turns_reached,
        total_reward=expected.total_reward,
        turn_gen_tokens=expected.turn_gen_tokens,
        turn_input_tokens=result.metrics.turn_input_tokens,
        clipped_turns=sum(message.finish_reason == "length" for message in responses),
    )


@given(recipe=raw_recipes)
def test_a_random_episode_is_that_of_the_reference(recipe: EpisodeRecipe) -> None:
    result = play(recipe, RandomGenerator(), RandomEnvironment())
    lengths = [message.finish_reason == "length" for message in result.message_log]
    event("a response was cut by max_seq_len" if any(lengths) and result.truncated else "none was cut")
    assert_equal(result, reference(recipe))
