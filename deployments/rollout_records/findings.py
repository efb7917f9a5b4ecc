"""Tells by their patterns why a trainer's log-probabilities part from the sampled ones. No I/O.

Let `d` be the trainer's log-probability of a sampled token less the sampled one, `s`. If the trainer looks at other
tokens than were sampled, `s + d` has nothing to do with `s`. With another temperature, `d` is a line over `s`: from
sampling at `T` to the trainer's `T'`, of slope `T / T' - 1`. With another prompt, `d` is largest where a message
begins. With other weights it is none of these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from deployments.rollout_records.comparison import UNKNOWN, ComparedRollout
from deployments.rollout_records.ratios import Floats, Sums, TokenLabels, sums_by, total, totals_by

MismatchKind = Literal[
    "replica", "missing_mask", "other_tokens", "wrong_temperature", "wrong_version", "other_prompt", "misaligned"
]
LEAST_TOKENS = 200
LEAST_WINDOW = 16
"""Fewer tokens or rollouts show no pattern."""
LEAST_SLOPE = 0.1
LEAST_CORRELATION = 0.5
HEAD_FACTOR = 3.0
"""By how much the differences at the beginning of messages exceed the others, if the prompt is another one."""
LEAST_SIZE = 1e-4
"""A smaller mean difference is none."""
LEAST_KINSHIP = 0.3
"""The correlation of the trainer's log-probabilities with the sampled ones, if both are of the same tokens."""
MOST_CORRELATED = 5.0
"""A difference beyond this counts as this in a correlation, which a few tokens would decide otherwise. Where most
tokens are certain, few show a cause: they part by less."""
LEAST_GROUPS = 2
"""Groups of which a suspected replica has made rollouts, at least; its siblings together have twice as many."""
LEAST_DEVIATIONS = 2.0
"""Between the rank sum of a suspect's groups and its mean, in standard deviations. A suspicion convicts nobody."""
LEAST_FACTOR = 2.0
"""Between the median difference of a suspected replica and that of its siblings."""


@dataclass(frozen=True, slots=True)
class MismatchFinding:
    """A cause, as a sentence that names what to look at."""

    kind: MismatchKind
    message: str
    replica: str | None = None
    version: str | None = None
    since: float = 0.0
    """When it was found first, in the ledger's seconds."""
    last: float = 0.0
    """When it was found last."""


@dataclass(frozen=True, slots=True)
class RolloutPattern:
    """The sums of one rollout. Tokens of another version than the trainer says it has are left out: they must part."""

    rollout_id: str
    owner: str
    group: str
    temperature: float
    by_replica: Mapping[str, Sums]
    by_version: Mapping[str, Sums]
    head: Sums
    rest: Sums
    moments: Floats = field(compare=False)
    """The number of tokens, and their sums of `s`, `d`, `s * s`, `s * d` and `d * d`; see `MOST_CORRELATED`."""
    unmasked: int
    other_token: tuple[int, int] | None


def pattern_of(rollout: ComparedRollout, owner: str) -> RolloutPattern:
    stated = rollout.stated_version
    versions = rollout.labels["version"]
    counts = np.array([stated in (None, version) for version in versions.names])[versions.codes]
    difference = rollout.difference[counts]

    def counted(attribute: str) -> dict[str, Sums]:
        names, codes = rollout.labels[attribute]
        return sums_by(TokenLabels(names, codes[counts]), difference)

    places = counted("position")
    return RolloutPattern(
        rollout.rollout_id,
        owner,
        rollout.group,
        rollout.temperature,
        counted("replica"),
        counted("version"),
        places.get("head", Sums()),
        places.get("rest", Sums()),
        _moments_of(rollout.sampled[counts], difference),
        rollout.unmasked,
        rollout.other_token,
    )


def _moments_of(s: Floats, difference: Floats) -> Floats:
    d = np.clip(difference, -MOST_CORRELATED, MOST_CORRELATED)
    return np.array([len(s), s.sum(), d.sum(), (s * s).sum(), (s * d).sum(), (d * d).sum()])


def findings_of(window: Sequence[RolloutPattern], most_mean_ratio: float) -> list[MismatchFinding]:
    """The causes that the recent rollouts show, but for what one replica alone does.

    Args:
        most_mean_ratio: the trainer parts from the service if the mean ratio of all tokens is above this.
    """
    found = list(_about_tokens(window))
    everything = total(sums for one in window for sums in one.by_version.values())
    is_enough = everything.tokens >= LEAST_TOKENS and len(window) >= LEAST_WINDOW
    if is_enough and everything.mean_ratio > most_mean_ratio:
        found.append(_cause_of(window, everything, most_mean_ratio))
    return found


def _about_tokens(window: Sequence[RolloutPattern]) -> Iterable[MismatchFinding]:
    """Causes that the trainer's masks and token ids show by themselves."""
    if unmasked := [one for one in window if one.unmasked]:
        yield MismatchFinding(
            "missing_mask",
            f"The trainer's mask has tokens in the loss that are no samples of the policy, in {len(unmasked)} of "
            f"{len(window)} rollouts: {unmasked[-1].unmasked} in {unmasked[-1].rollout_id}. Train where "
            "`generation_logprobs` is set, without messages that are `constrained` or whose `sampled_with` has "
            "temperature 0, and nowhere else.",
        )
    if others := [one for one in window if one.other_token is not None]:
        message, place = others[-1].other_token or (0, 0)
        yield MismatchFinding(
            "other_tokens",
            f"The trainer has other token ids than the log, in {len(others)} of {len(window)} rollouts: in "
            f"{others[-1].rollout_id} from token {place} of message {message} on. It has rendered the text again, with "
            "another template or tokenizer: train on the `token_ids` of the log.",
        )


def _cause_of(window: Sequence[RolloutPattern], everything: Sums, most_mean_ratio: float) -> MismatchFinding:
    """Why the tokens of the window part from the trainer's."""
    n, s, d, ss, sd, dd = np.sum([one.moments for one in window], axis=0)
    apart = f"The probabilities differ by a factor of {everything.mean_ratio:.3g} on average"
    by_version = totals_by(of_version for one in window for of_version in one.by_version.items())
    told = {version: sums for version, sums in by_version.items() if version != UNKNOWN}
    known = {version: sums for version, sums in told.items() if sums.tokens >= LEAST_TOKENS}
    agree = [version for version, sums in known.items() if sums.mean_ratio <= most_mean_ratio]
    parted = [version for version, sums in known.items() if sums.mean_ratio > most_mean_ratio]
    if agree and parted:
        return MismatchFinding(
            "wrong_version",
            f"{apart}: tokens of version {', '.join(agree)} agree, those of {', '.join(parted)} do not. The trainer "
            f"has computed with version {agree[-1]}: let it say so (`weight_version`), or compute each with its own.",
            version=agree[-1],
        )
    spread_s, spread_d, together = ss / n - (s / n) ** 2, dd / n - (d / n) ** 2, sd / n - s * d / n**2
    kinship = _correlation_of(spread_s + together, spread_s, spread_s + 2 * together + spread_d)
    if kinship < LEAST_KINSHIP:
        return MismatchFinding(
            "misaligned",
            f"{apart}, and the trainer's log-probabilities have hardly to do with the sampled ones (correlation "
            f"{kinship:.2f}): they are of other tokens. Look for a shift by one, rows in another order, or weights "
            "that were never loaded.",
        )
    slope, correlation = together / spread_s if spread_s > 0 else 0.0, _correlation_of(together, spread_s, spread_d)
    if abs(slope) >= LEAST_SLOPE and abs(correlation) >= LEAST_CORRELATION and slope > -1:
        sampled_at = median(one.temperature for one in window)
        return MismatchFinding(
            "wrong_temperature",
            f"{apart}, and the difference grows with the log-probability (slope {slope:+.2f}): the trainer's are of a "
            f"temperature near {sampled_at / (1 + slope):.2g}, and sampled was at {sampled_at:g}. Divide the trainer's "
            "logits by the temperature of the request.",
        )
    head, rest = total(one.head for one in window), total(one.rest for one in window)
    is_enough = min(head.tokens, rest.tokens) >= LEAST_TOKENS / 4
    if is_enough and head.mean_size >= HEAD_FACTOR * rest.mean_size:
        factor = head.mean_size / max(rest.mean_size, LEAST_SIZE)
        return MismatchFinding(
            "other_prompt",
            f"{apart}, and {factor:.2g} times more where messages begin than behind: the "
            "trainer has another prompt before them. Compare its chat template, system prompt and special tokens, or "
            "report `token_ids` to be told the token.",
        )
    versions = ", ".join(by_version)
    return MismatchFinding(
        "wrong_version",
        f"{apart}, everywhere alike: the trainer has other weights than the service had as version {versions}. Compare "
        "which version it computes with, and what it has pushed (`rollout policy`, checksums).",
    )


def _correlation_of(together: float, spread_one: float, spread_other: float) -> float:
    """From covariance and variances; 1 where nothing varies."""
    product = spread_one * spread_other
    return together / product**0.5 if product > 0 else 1.0


def suspect_of(window: Sequence[RolloutPattern]) -> str | None:
    """The replica whose groups part from the trainer more than those of its siblings, if one does: the one to look at.

    A Mann-Whitney test over the mean differences of groups, each the median of its rollouts on a replica. A rollout
    that was reported several times counts as it was last.
    """
    by_replica: dict[str, dict[tuple[str, str], list[float]]] = {}
    for one in {(one.owner, one.rollout_id): one for one in window}.values():
        for name, sums in one.by_replica.items():
            if name != UNKNOWN:
                by_replica.setdefault(name, {}).setdefault((one.owner, one.group), []).append(sums.mean_size)
    if len(by_replica) < 3:
        # Of two that differ, nothing says which is at fault.
        return None
    sizes = {name: [*map(median, groups.values())] for name, groups in by_replica.items()}
    worst = max(sizes, key=lambda name: median(sizes[name]))
    own, others = sizes[worst], [size for name, of_group in sizes.items() if name != worst for size in of_group]
    if len(own) < LEAST_GROUPS or len(others) < 2 * LEAST_GROUPS:
        return None
    if median(own) < LEAST_FACTOR * median(others) or median(own) == 0:
        return None
    return worst if _deviations(own, others) >= LEAST_DEVIATIONS else None


def _deviations(own: Sequence[float], others: Sequence[float]) -> float:
    """By how many standard deviations the rank sum of `own` exceeds its mean if both are of one distribution."""
    both = np.array([*own, *others])
    order = np.sort(both)
    ranks = (np.searchsorted(order, both, "left") + np.searchsorted(order, both, "right") + 1) / 2
    m, n = len(own), len(others)
    mean, spread = m * (m + n + 1) / 2, (m * n * (m + n + 1) / 12) ** 0.5
    return float((ranks[:m].sum() - mean) / spread)
