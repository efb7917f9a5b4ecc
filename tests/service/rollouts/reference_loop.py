"""The loop of NeMo-RL's rollout module (v0.3.0) for one sample, in our own words: the shortest program that says it.

Where ours departs from it on purpose, this one departs too: the turn limit is reported only when it ended the sample,
and "none" leaves stop strings and metadata as they are.
"""

from dataclasses import dataclass, field
from typing import Any

from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import GenerationRequest, SamplingOptions
from rollout_env import ChatMessage
from tests.service.rollouts.playing import RandomEnvironment, RandomGenerator
from tests.service.scripted import EpisodeRecipe, ids_of, text_of


@dataclass
class ReferenceSample:
    """What the reference keeps of a sample while it plays it."""

    log: list[tuple[str, list[int]]]
    """Role and token ids of each message."""
    logprobs: list[list[float]] = field(default_factory=list)
    """Of each response."""
    total_reward: float = 0.0
    turn_gen_tokens: list[int] = field(default_factory=list)
    env_tokens: int = 0
    terminated: bool = False
    truncated: bool = False
    max_turns_reached: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token_id for _, token_ids in self.log for token_id in token_ids]

    def chat(self) -> list[ChatMessage]:
        return [
            {"role": "assistant" if role == "assistant" else "user", "content": text_of(token_ids)}
            for role, token_ids in self.log
        ]


async def reference_rollout(
    recipe: EpisodeRecipe, generator: RandomGenerator, environment: RandomEnvironment
) -> ReferenceSample:
    """Plays the sample; observations are tokenized as they are (`raw`)."""
    sample = ReferenceSample([("user", ids_of(recipe.prompt))])
    extra_env_info: dict[str, Any] = recipe.extra_env_info
    stop_strings = recipe.stop_strings
    for turn in range(recipe.max_rollout_turns):
        room = recipe.max_seq_len - len(sample.token_ids)
        if room <= 0:
            sample.truncated = True
            break
        most = min(room, recipe.max_new_tokens or room)
        response = await generator.generate(
            GenerationRequest(f"{turn}", sample.token_ids, most, stop_strings, SamplingOptions())
        )
        sample.log.append(("assistant", list(response.token_ids)))
        sample.logprobs.append(list(response.logprobs))
        sample.turn_gen_tokens.append(len(response.token_ids))
        # However the generation ended, it is judged: a response that was cut has its reward.
        outcome = await environment.step(StepRequest(sample.chat(), extra_env_info))
        assert isinstance(outcome.reward, float)
        sample.total_reward += outcome.reward
        [said] = outcome.observations
        observation = ids_of(said["content"])
        room = recipe.max_seq_len - len(sample.token_ids)
        if len(observation) >= room:
            observation = observation[: max(room, 0)]
            sample.truncated = True
        sample.log.append((said["role"], observation))
        sample.env_tokens += len(observation)
        sample.terminated = outcome.terminated
        if sample.terminated or sample.truncated:
            break
        stop_strings = stop_strings if outcome.next_stop_strings is None else tuple(outcome.next_stop_strings)
        extra_env_info = extra_env_info if outcome.metadata is None else outcome.metadata
        sample.max_turns_reached = turn == recipe.max_rollout_turns - 1
    return sample
