"""Readings of a `SampleResult` for a trainer: token rows, final rewards, advantages, staleness. Needs only pydantic.

A rollout has a final reward if it ended, rather than failed or was cut off. `resumed` continues one that was cut off.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, takewhile
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from rollout_client.contract.base import read_label
from rollout_client.contract.messages import Branch, FinishReason, GivenMessage, Message, may_be_trained
from rollout_client.contract.rollouts import RolloutResponse, SampleInput, SampleResult, SampleStatus
from rollout_client.contract.sessions import SessionSample
from rollout_client.errors import RolloutError

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse

FINAL_STATUSES: frozenset[SampleStatus] = frozenset({"completed", "truncated", "max_turns"})


class RolloutsNotFinal(RolloutError):
    """Some rollouts have no final reward, and the caller asked for all of them.

    Args:
        samples: the rollouts without a final reward; at least one.
        total: the number of rollouts that were played, these included.
    """

    def __init__(self, samples: Sequence[SampleResult], total: int) -> None:
        first, error = samples[0], samples[0].error
        reason = first.status if error is None else f"{error.kind} error: {error.message}"
        super().__init__(
            f"{len(samples)} of {total} rollouts have no final reward; idx {first.idx} of task {first.task_name}, "
            f"generation {first.generation_index}: {reason}"
        )
        self.samples = samples


def final_reward(sample: SampleResult) -> float | None:
    """`total_reward` where it is final; `None` for a rollout that failed, or ended by a deadline or a cancellation."""
    return sample.total_reward if sample.status in FINAL_STATUSES else None


def is_generated(message: Message) -> bool:
    return message.generation_logprobs is not None


def generated_places(sample: SampleResult) -> list[int]:
    """The indexes of the responses in the log."""
    return [place for place, message in enumerate(sample.message_log) if is_generated(message)]


def trained_places(sample: SampleResult) -> list[int]:
    """The indexes of the responses that may be trained."""
    return [place for place, message in enumerate(sample.message_log) if may_be_trained(message)]


def finish_reasons(sample: SampleResult) -> list[FinishReason | None]:
    """The finish reason of each response of the log; `None` for one whose generation was interrupted."""
    return [message.finish_reason for message in sample.message_log if is_generated(message)]


def last_finish_reason(sample: SampleResult) -> FinishReason | None:
    """`None` without a response too."""
    return (finish_reasons(sample) or [None])[-1]


def is_clipped(sample: SampleResult) -> bool:
    """Whether its length has cut the last response, so that the policy did not end it. TRL's
    `mask_truncated_completions` takes such rollouts out of the loss, and verl's `clip_ratio` counts them."""
    return last_finish_reason(sample) == "length"


STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL, so that equal rewards give 0 and not a division by zero."""


def group_relative_advantages(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, scale_rewards: bool = True
) -> list[float]:
    """`(reward - mean) / (std + STD_EPSILON)` over the rewards of one group, as in GRPO (arXiv:2402.03300).

    Args:
        rewards: one per rollout; `None` where a rollout has no final reward. Such a rollout enters no statistic of its
            group, and its advantage is 0.
        groups: the group of each rollout, of the same length as `rewards`. The advantage in a group of one is 0.
        scale_rewards: divide by the standard deviation with n - 1 degrees of freedom, as TRL's GRPOTrainer does.
            Without it the result is `reward - mean`, as in Dr. GRPO (arXiv:2503.20783).
    """
    known = known_by_group(rewards, groups)
    means = {group: math.fsum(found) / len(found) for group, found in known.items()}
    scales = {
        group: sample_std(found, means[group]) + STD_EPSILON if scale_rewards else 1.0 for group, found in known.items()
    }
    return [
        0.0 if reward is None else (reward - means[group]) / scales[group]
        for reward, group in zip(rewards, groups, strict=True)
    ]


def wilson_interval(mean: float, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a proportion `mean` of `count`, at least 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)


def known_by_group(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[Hashable, list[float]]:
    """The rewards of each group that are not `None`."""
    known: dict[Hashable, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            known[group].append(reward)
    return known


def sample_std(values: Sequence[float], mean: float) -> float:
    """Standard deviation of `values` with n - 1 degrees of freedom; 0 for a single value."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def filled_in(rewards: Sequence[float | None], groups: Sequence[Hashable], otherwise: float) -> list[float]:
    """The rewards; a missing one is the mean of its group, or `otherwise` where the group has no reward.

    So the baseline of a group does not change.
    """
    means = {group: sum(found) / len(found) for group, found in known_by_group(rewards, groups).items()}
    return [
        means.get(group, otherwise) if reward is None else reward for group, reward in zip(groups, rewards, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Staleness:
    """Statistics over the generated tokens whose weight version is known; each token has the same weight.

    The lag of a token is `trainer_version` less the version that made it: 0 is on-policy, and below 0 the service was
    ahead. Without such tokens all but the counts are `None`.
    """

    tokens: int
    """Generated tokens whose version is known."""
    unknown_tokens: int
    """Generated tokens without a version of this policy: those of a posted message log that had none, or another's."""
    oldest: int | None = None
    """The lowest version that made a token."""
    newest: int | None = None
    """The highest version that made a token."""
    mean_lag: float | None = None
    max_lag: int | None = None
    """That of the oldest version."""


def staleness(
    rollouts: "SampleResult | RolloutResponse | ArrowResponse", trainer_version: int, name: str | None = None
) -> Staleness:
    """The staleness of one rollout, or of all rollouts of a response together, failed and stale ones included.

    Args:
        trainer_version: the version of the weights that are trained with these rollouts, as the trainer pushed them.
        name: the policy that it is a version of; by default the one without a name.
    """
    samples = [rollouts] if isinstance(rollouts, SampleResult) else rollouts.samples
    tokens_by_version: Counter[int] = Counter()
    generated = 0
    for message in (message for sample in samples for message in sample.message_log):
        if message.generation_logprobs is not None:
            generated += len(message.token_ids)
            for span in message.weight_versions or []:
                label = read_label(span.version)
                if label.name == name:
                    tokens_by_version[label.number] += span.end - span.start
    tokens_by_version = +tokens_by_version
    tokens = tokens_by_version.total()
    if not tokens:
        return Staleness(tokens=0, unknown_tokens=generated)
    oldest = min(tokens_by_version)
    lag = sum((trainer_version - version) * count for version, count in tokens_by_version.items())
    return Staleness(
        tokens=tokens,
        unknown_tokens=generated - tokens,
        oldest=oldest,
        newest=max(tokens_by_version),
        mean_lag=lag / tokens,
        max_lag=trainer_version - oldest,
    )


def resumed(sample: SampleResult) -> SampleInput:
    """A sample that continues `sample` from its last token, with all its fields; it can be posted as it is.

    A response in whose middle it was cut off goes on as the same message. Its turns so far count towards
    `max_rollout_turns`; its rewards so far are on its messages, and the new result counts only what comes after.
    Under greedy decoding it ends as if it had never been cut; sampled, also with a seed, it draws the rest anew.
    """
    shared = SampleInput.model_fields.keys() & SampleResult.model_fields.keys()
    fields = {**(sample.model_extra or {}), **{name: getattr(sample, name) for name in shared}}
    known = set(GivenMessage.model_fields)
    log = [message.model_dump(exclude_unset=True, include=known) for message in sample.message_log]
    return SampleInput.model_validate({**fields, "message_log": log})


def main_branch(branches: Sequence[SessionSample]) -> SessionSample:
    """The branch that is the rollout's own log: the one generated last, but of the seats of a game the first.

    Which seat moves last depends on who wins: a trainer that reads the log alone would see winners.
    """
    last = branches[-1]
    seats = [branch for branch in branches if are_seats(last, branch)]
    return min([last, *seats], key=lambda branch: min(branch.rewards)) if seats else last


def are_seats(one: SessionSample, other: SessionSample) -> bool:
    """Whether each has rewards, and none of the other's names: seats of a game name their own."""
    return bool(one.rewards and other.rewards) and one.rewards.keys().isdisjoint(other.rewards)


def branches_beside(main: SessionSample, others: Sequence[SessionSample]) -> list[Branch]:
    """The other branches of a session, beside the one that is the rollout's own log."""
    generated = [dict(zip(generated_places(one), one.generation_ids, strict=True)) for one in (main, *others)]
    branches = []
    for sample, shared in zip(others, _shared_places(*generated), strict=True):
        own: dict[str, Any] = {"rewards": sample.rewards} if are_seats(main, sample) else {}
        branches.append(Branch.model_construct(message_log=sample.message_log, shared_messages=shared, **own))
    return branches


def _shared_places(main: Mapping[int, Hashable], *others: Mapping[int, Hashable]) -> Iterator[list[int]]:
    """For each of the others the places of generated messages that the main branch, or one before it, has too."""
    known = set(main.values())
    for generated in others:
        yield [place for place, name in generated.items() if name in known]
        known.update(generated.values())


def logs_of(sample: SampleResult) -> list[Sequence[Message]]:
    """The logs of its branches, and its own after them."""
    return [*(branch.message_log for branch in sample.branches), sample.message_log]


def turns_of(logs: Iterable[Sequence[Message]]) -> list[dict[int, int]]:
    """The number of the turn of each generated message, by place, in the logs that one rollout had after one another.

    A log begins with the messages of the one before that are the same in both.
    """
    numbers, turns = count(), [dict[int, int]()]
    for before, log in pairwise([[], *logs]):
        same = sum(1 for _ in takewhile(lambda pair: _are_same(*pair), zip(before, log, strict=False)))
        known = {place: turn for place, turn in turns[-1].items() if place < same}
        new = (place for place, message in enumerate(log) if is_generated(message) and place not in known)
        turns.append(known | {place: next(numbers) for place in new})
    return turns[1:]


def _are_same(one: Message, other: Message) -> bool:
    return one is other or (is_generated(one) == is_generated(other) and [*one.token_ids] == [*other.token_ids])


def left_branches(branches: Sequence[Branch], log: Sequence[Message]) -> list[Branch]:
    """The logs that a rollout has left for this one, and which generated messages they share."""
    *others, main = turns_of([*(branch.message_log for branch in branches), log])
    shared = zip(branches, _shared_places(main, *others), strict=True)
    return [branch.model_copy(update={"shared_messages": places}) for branch, places in shared]


def branches_of(sample: SampleResult) -> list[SampleResult]:
    """The branches that share the rollout's rewards, each as a rollout with its own log, and the rollout itself.

    A message that several of them have is a generated one in one of them alone, so that a loss over all rows counts
    each token once. Advantages are of whole rollouts: compute them before, and give each row that of its rollout.
    """
    return [*(_rollout_of(sample, branch) for branch in sample.branches if branch.rewards is None), sample]


def seats_of(sample: SampleResult) -> list[SampleResult]:
    """The seats of the policy in a game, each as a rollout with its own log and rewards; any other rollout alone.

    The name of its reward says the seat, such as `seat_0`: seats of one number and one `idx` are a group, because they
    begin alike. Branches that share the rewards of the rollout stay with its own log.
    """
    own = [branch for branch in sample.branches if branch.rewards is not None]
    shared = [branch for branch in sample.branches if branch.rewards is None]
    return [sample.model_copy(update={"branches": shared}), *(_rollout_of(sample, branch) for branch in own)]


def _rollout_of(sample: SampleResult, branch: Branch) -> SampleResult:
    """The branch as a rollout. `metrics` are those of the whole rollout; the service knows it by no `rollout_id`."""
    rewards = sample.rewards if branch.rewards is None else branch.rewards
    total = None if sample.total_reward is None else sum(rewards.values())
    once = {place: {"generation_logprobs": None} for place in branch.shared_messages}
    log = [message.model_copy(update=once.get(place)) for place, message in enumerate(branch.message_log)]
    own = {"message_log": log, "rewards": rewards, "total_reward": total, "replay": None}
    return sample.model_copy(update={**own, "branches": [], "rollout_id": None})


UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one message log, in order; every list has one entry per token."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 for a token that the policy generated and that may be trained (`contract.messages.may_be_trained`), else 0."""
    generation_logprobs: list[float]
    """Natural logarithms; 0 for a token that the policy did not generate."""
    weight_versions: list[int]
    """Numbers, without the name of a named policy; -1 for a token that no policy generated, or whose version the
    service did not report."""
    prompt_length: int
    """Number of tokens before the first generated token; all tokens where none was generated."""
    generated_length: int
    """Number of tokens up to the last generated one; all tokens where none was generated."""

    def without_tail(self) -> "TokenRow":
        """The row up to its last generated token. No generation has seen the observations after that token."""
        return self.part(0, self.generated_length)

    def part(self, start: int, end: int) -> "TokenRow":
        """The tokens from `start` to before `end`."""
        token_ids = self.token_ids[start:end]
        return TokenRow(
            token_ids,
            self.loss_mask[start:end],
            self.generation_logprobs[start:end],
            self.weight_versions[start:end],
            min(max(self.prompt_length - start, 0), len(token_ids)),
            min(max(self.generated_length - start, 0), len(token_ids)),
        )


def images_shown(log: Sequence[Message]) -> list[str]:
    """The names of the images in a message log, `sha256:...`, in the order of their tokens; one shown twice is there
    twice."""
    return [shown.media for message in log for shown in message.mm_ranges or ()]


def token_row(sample: SampleResult) -> TokenRow:
    """Raises `ValueError` if a generated message does not have one log-probability per token, or the rollout shows
    images: a model that is given its tokens alone has other log-probabilities."""
    if images_shown(sample.message_log):
        raise ValueError("A rollout shows images, and a row of tokens has none: use to_tensors and image_inputs.")
    row = TokenRow([], [], [], [], 0, 0)
    first = last = None
    for message in sample.message_log:
        start, count, logprobs = len(row.token_ids), len(message.token_ids), message.generation_logprobs
        if logprobs is not None and len(logprobs) != count:
            raise ValueError(
                f"A message has {count} token_ids and {len(logprobs)} generation_logprobs; there must be one for each "
                "token."
            )
        if logprobs:
            first, last = start if first is None else first, start + count
        row.token_ids.extend(message.token_ids)
        row.loss_mask.extend([int(may_be_trained(message))] * count)
        row.generation_logprobs.extend([0.0] * count if logprobs is None else logprobs)
        row.weight_versions.extend([UNKNOWN_VERSION] * count)
        for span in () if logprobs is None else message.weight_versions or ():
            end = min(span.end, count)
            row.weight_versions[start + span.start : start + end] = [read_label(span.version).number] * (
                end - span.start
            )
    length = len(row.token_ids)
    # A log without a generated token is all prompt.
    return replace(
        row, prompt_length=length if first is None else first, generated_length=length if last is None else last
    )
