"""Tells by their patterns why a trainer's log-probabilities part from the sampled ones. No I/O.

Let `d` be the trainer's log-probability of a sampled token less the sampled one, `s`. If the trainer looks at other
tokens than were sampled, `s + d` has nothing to do with `s`. With another temperature, `d` is a line over `s`: from
sampling at `T` to the trainer's `T'`, of slope `T / T' - 1`. With other weights it is neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from deployments.rollout_records.comparison import UNKNOWN, ComparedRollout, Sums, totals_by

LEAST_TOKENS = 200
LEAST_WINDOW = 16
"""Fewer tokens or rollouts show no pattern."""
LEAST_SLOPE = 0.1
LEAST_CORRELATION = 0.5
LEAST_KINSHIP = 0.3
"""The correlation of the trainer's log-probabilities with the sampled ones, if both are of the same tokens."""
LEAST_GROUPS = 2
"""Groups of which a suspected replica has made rollouts, at least; its siblings together have twice as many."""
LEAST_DEVIATIONS = 2.0
"""Between the rank sum of a suspect's groups and its mean, in standard deviations. A suspicion convicts nobody."""
LEAST_FACTOR = 2.0
"""Between the median excess of a suspected replica's ratios over 1 and that of its siblings."""


@dataclass(frozen=True, slots=True)
class MismatchFinding:
    """A cause, as a sentence that names what to look at."""

    kind: str
    """A `kind` of `MismatchCause`."""
    message: str
    replica: str | None = None
    last: float = 0.0
    """When it was found last, in the ledger's seconds."""


def findings_of(window: Sequence[ComparedRollout], most_mean_ratio: float) -> list[MismatchFinding]:
    """The causes that the recent rollouts show, but for what one replica alone does.

    Args:
        most_mean_ratio: the trainer parts from the service if the mean ratio of all tokens is above this.
    """
    found: list[MismatchFinding] = []
    if unmasked := [one for one in window if one.unmasked]:
        message = (
            f"The trainer's mask has tokens in the loss that are no samples of the policy, in {len(unmasked)} of "
            f"{len(window)} rollouts: {unmasked[-1].unmasked} in {unmasked[-1].rollout_id}. Train where "
            "`generation_logprobs` is set, without messages that are `constrained` or whose `sampled_with` has "
            "temperature 0, and nowhere else."
        )
        found.append(MismatchFinding("missing_mask", message))
    if others := [one for one in window if one.other_token is not None]:
        message = (
            f"The trainer has other token ids than the log, in {len(others)} of {len(window)} rollouts: in "
            f"{others[-1].rollout_id} from token {others[-1].other_token} of the log on. It has rendered the text "
            "again, with another template or tokenizer: train on the `token_ids` of the log."
        )
        return [*found, MismatchFinding("other_tokens", message)]
    versions = totals_by(of_version for one in window for of_version in one.versions.items())
    everything = sum(versions.values(), Sums())
    is_enough = everything.tokens >= LEAST_TOKENS and len(window) >= LEAST_WINDOW
    if is_enough and everything.mean_ratio > most_mean_ratio:
        kind, message = _cause_of(window, versions, most_mean_ratio)
        apart = f"The probabilities differ by a factor of {everything.mean_ratio:.3g} on average"
        found.append(MismatchFinding(kind, f"{apart}{message}"))
    return found


def _cause_of(
    window: Sequence[ComparedRollout], versions: Mapping[str, Sums], most_mean_ratio: float
) -> tuple[str, str]:
    """Why the tokens of the window part from the trainer's: the kind, and the rest of the sentence."""
    known = {name: sums for name, sums in versions.items() if name != UNKNOWN and sums.tokens >= LEAST_TOKENS}
    agree = [name for name, sums in known.items() if sums.mean_ratio <= most_mean_ratio]
    parted = [name for name in known if name not in agree]
    if agree and parted:
        return "wrong_version", (
            f": tokens of version {', '.join(agree)} agree, those of {', '.join(parted)} do not. The trainer has "
            f"computed with version {agree[-1]}: let it say so (`weight_version`), or compute each with its own."
        )
    n, s, d, ss, sd, dd = np.sum([one.moments for one in window], axis=0)
    spread_s, spread_d, together = ss / n - (s / n) ** 2, dd / n - (d / n) ** 2, sd / n - s * d / n**2
    kinship = _correlation_of(spread_s + together, spread_s, spread_s + 2 * together + spread_d)
    if kinship < LEAST_KINSHIP:
        return "misaligned", (
            f", and the trainer's log-probabilities have hardly to do with the sampled ones (correlation {kinship:.2f})"
            ": they are of other tokens. Look for a shift by one, rows in another order, or weights that were never "
            "loaded."
        )
    slope, correlation = together / spread_s if spread_s > 0 else 0.0, _correlation_of(together, spread_s, spread_d)
    if abs(slope) >= LEAST_SLOPE and abs(correlation) >= LEAST_CORRELATION and slope > -1:
        sampled_at = median(one.temperature for one in window)
        return "wrong_temperature", (
            f", and the difference grows with the log-probability (slope {slope:+.2f}): the trainer's are of a "
            f"temperature near {sampled_at / (1 + slope):.2g}, and sampled was at {sampled_at:g}. Divide the trainer's "
            "logits by the temperature of the request."
        )
    return "wrong_version", (
        f": the trainer has other weights than the service had as version {', '.join(versions)}, or another prompt. "
        "Compare which version it computes with, and what it has pushed (`rollout policy`, checksums), and report "
        "`token_ids` to compare the prompts."
    )


def _correlation_of(together: float, spread_one: float, spread_other: float) -> float:
    """From covariance and variances; 1 where nothing varies."""
    product = spread_one * spread_other
    return together / product**0.5 if product > 0 else 1.0


def suspect_of(window: Sequence[ComparedRollout]) -> str | None:
    """The replica whose groups part from the trainer more than those of its siblings, if one does: the one to look at.

    A Mann-Whitney test over the excess ratios of groups, each the median of its rollouts on a replica. A rollout that
    was reported several times counts as it was last.
    """
    by_replica: dict[str, dict[str, list[float]]] = {}
    for one in {one.rollout_id: one for one in window}.values():
        for name, sums in one.replicas.items():
            if name != UNKNOWN:
                by_replica.setdefault(name, {}).setdefault(one.group, []).append(sums.mean_ratio - 1)
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
