"""The rewards of the turns of a rollout: of its responses that may be trained. Needs only pydantic."""

from collections.abc import Sequence
from itertools import compress

from rollout_client.contract.messages import may_be_trained
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import is_generated


def turn_rewards(sample: SampleResult, total: float | None) -> list[float]:
    """The rewards of the turns of a rollout with this final reward, one for each response that may be trained; see
    `rewards_by_turn`."""
    generated = [is_generated(message) for message in sample.message_log]
    return rewards_by_turn(
        generated,
        [may_be_trained(message) for message in sample.message_log],
        [message.reward for message in sample.message_log],
        total,
        is_whole=sum(generated) <= sample.metrics.turn_count,
    )


def rewards_by_turn(
    generated: Sequence[bool],
    trained: Sequence[bool],
    rewards: Sequence[float | None],
    total: float | None,
    *,
    is_whole: bool,
) -> list[float]:
    """The reward of each generated message that may be trained, with the messages up to the next one.

    The last turn also has what the total has beyond them, such as the reward of a whole session: then the turns sum to
    the total. The first one has what generated messages before it earned that may not be trained.

    Args:
        generated: whether the policy generated the message.
        trained: whether it may be trained.
        rewards: the messages' own; a missing one is 0.
        total: the final reward of the rollout; `None` if it has none.
        is_whole: whether the total is of all turns of the log. It is not where a rollout was continued from a posted
            log, whose turns have the rewards of their messages alone.
    """
    turns: list[float] = []
    for is_turn, reward in zip(generated, rewards, strict=True):
        if is_turn:
            turns.append(0.0)
        # A message before the first response belongs to no turn.
        if turns and reward is not None:
            turns[-1] += reward
    if turns and total is not None and is_whole:
        turns[-1] += total - sum(turns)
    return of_trained(turns, [*compress(trained, generated)])


def of_trained(turns: Sequence[float], trained: Sequence[bool]) -> list[float]:
    """Gives the rewards of turns that may not be trained to the one before that may be, else to the first that may."""
    kept: list[float] = []
    early = 0.0
    for reward, is_trained in zip(turns, trained, strict=True):
        if is_trained:
            kept.append(early + reward)
            early = 0.0
        elif kept:
            kept[-1] += reward
        else:
            early += reward
    return kept
