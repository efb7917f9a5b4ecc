"""Compares the log-probabilities that a trainer computed with those that a rollout was sampled with, token by token.

Between two log-probabilities of one token, the ratio of the probabilities is `exp(|difference|)`: 1 if they agree. A
mean counts no token as more than `MOST_COUNTED`, so that a few tokens decide nothing; how many are beyond it stands
beside the mean, and so does the largest ratio. No I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import exp, log
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deployments.protocols.generation import packed_logprobs
from rollout_client.contract.messages import may_be_compared, may_be_trained

Floats = NDArray[np.float64]
Key = TypeVar("Key")
_Span = tuple[int, int, int, str]
"""Tokens of a message, by its index, start and end, and their label."""
MOST_COUNTED = 10.0
"""A token whose ratio is beyond this counts as this in a mean."""
LARGEST_DIFFERENCE = 20.0
"""Differences beyond this count as this much: one token of probability 0 says as much as can be said."""
MOST_CORRELATED = 5.0
"""A difference beyond this counts as this in a correlation, which a few tokens would decide otherwise. Where most
tokens are certain, few show a cause: they part by less."""
UNKNOWN = "unknown"
MOST_LABELS = 32
"""Versions or replicas of one rollout that are told apart."""
MOST_DIGITS = 18


class ReportRefused(Exception):
    """The report does not fit the rollout; the message is a sentence for the trainer."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over tokens of the ratio of their probabilities."""

    tokens: int = 0
    ratio: float = 0.0
    """Sum of the ratios, of each token at most `MOST_COUNTED`."""
    beyond: int = 0
    """Tokens whose ratio is beyond `MOST_COUNTED`."""
    largest: float = 0.0
    """The largest difference of two log-probabilities."""

    @classmethod
    def of(cls, differences: ArrayLike) -> "Sums":
        """The sums of tokens with these differences."""
        sizes = sizes_of(differences)
        if not len(sizes):
            return cls()
        ratio = float(np.exp(np.minimum(sizes, log(MOST_COUNTED))).sum())
        return cls(len(sizes), ratio, int((sizes > log(MOST_COUNTED)).sum()), float(sizes.max()))

    def __add__(self, other: "Sums") -> "Sums":
        largest = max(self.largest, other.largest)
        return Sums(self.tokens + other.tokens, self.ratio + other.ratio, self.beyond + other.beyond, largest)

    @property
    def mean_ratio(self) -> float:
        return self.ratio / self.tokens if self.tokens else 1.0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `MismatchSums`."""
        share = self.beyond / self.tokens if self.tokens else 0.0
        return {
            "tokens": self.tokens,
            "mean_ratio": self.mean_ratio,
            "share_beyond": share,
            "largest_ratio": exp(self.largest),
        }


def sizes_of(differences: ArrayLike) -> Floats:
    return cast(Floats, np.minimum(np.abs(np.asarray(differences, np.float64)), LARGEST_DIFFERENCE))


def totals_by(parts: Iterable[tuple[Key, Sums]]) -> dict[Key, Sums]:
    """The total of each key, in the order in which they come."""
    totals: dict[Key, Sums] = {}
    for key, sums in parts:
        totals[key] = totals.get(key, Sums()) + sums
    return totals


@dataclass(frozen=True, slots=True, eq=False)
class TrainerReport:
    """A trainer's numbers of one rollout. `weight_version` is the label of the version that it computed with; `start`
    the place in the log of its first number, if the numbers may leave out the log's end."""

    rollout_id: str
    logprobs: Floats
    mask: NDArray[np.bool_] | None = None
    token_ids: NDArray[np.int64] | None = None
    weight_version: str | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class ComparedRollout:
    """A rollout beside a report about it, as sums over the tokens of the report that may be trained and were sampled as
    the request says."""

    rollout_id: str
    group: str
    """The `group_id` of its record."""
    policy: str
    temperature: float
    sums: Sums
    by: Mapping[str, Mapping[str, Sums]]
    """By attribute, `replica` or `version`, and its value."""
    replicas: Mapping[str, Sums]
    """By replica, without tokens of another version than the trainer says it has: they must part."""
    versions: Mapping[str, Sums]
    """By version, without those."""
    moments: Floats = field(compare=False)
    """The number of the same tokens, and their sums of `s`, `d`, `s * s`, `s * d` and `d * d`, where `s` is the sampled
    log-probability, and `d` the trainer's less `s`; see `MOST_CORRELATED`."""
    unmasked: int
    """Tokens that may not be trained, and that the trainer's mask has in the loss."""
    other_token: int | None
    """The place in the log of the first token that the trainer has another id for."""


def compared(
    record: Mapping[str, Any], report: TrainerReport, latest: Mapping[str, int]
) -> tuple[ComparedRollout, dict[str, Any]]:
    """Compares a report with the record of its rollout.

    Args:
        record: the fields of a `RolloutRecord`.
        latest: the latest version of each policy that is served, by name; that of the policy without one is under ''.

    Returns:
        The comparison, and what the record says of it: the fields of a `RolloutMismatch` but for the time.

    Raises:
        ReportRefused: it has another number of tokens than the rollout, or a number that is not finite.
    """
    rollout = record["rollout"]
    messages = rollout["message_log"]
    begins = [0, *accumulate(len(message["token_ids"]) for message in messages)]
    generated = [message.get("generation_logprobs") is not None for message in messages]
    is_generated, is_trained, is_compared = (
        np.repeat(np.array(flags, bool), np.diff(begins))
        for flags in (generated, [*map(may_be_trained, messages)], [*map(may_be_compared, messages)])
    )
    prompt = begins[generated.index(True)] if any(generated) else begins[-1]
    places = _places_of(report, is_generated, is_trained, prompt)
    chosen = places[is_compared[places]]
    given = report.logprobs[is_compared[places]]
    if not np.isfinite(given).all():
        raise ReportRefused("a log-probability of a trained token is not a finite number: send what was computed")
    sampled = np.full(begins[-1], np.nan)
    sampled[is_generated] = [*chain.from_iterable(message.get("generation_logprobs") or () for message in messages)]
    sampled = sampled[chosen]
    difference = np.clip(given - sampled, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    made_by = ((made["message"], made["start"], made["end"], made["replica"]) for made in record["generations"])
    replicas, of_replica = _labels_of(made_by, begins)
    versions, of_version = _labels_of(_versions_of(messages, latest), begins)
    of_replica, of_version = of_replica[chosen], of_version[chosen]
    counts = np.array([report.weight_version in (None, version) for version in versions])[of_version]
    s, d = sampled[counts], np.clip(difference[counts], -MOST_CORRELATED, MOST_CORRELATED)
    result = ComparedRollout(
        rollout_id=report.rollout_id,
        group=record["group_id"],
        policy=record.get("policy") or "unnamed",
        temperature=(rollout.get("replay") or {}).get("temperature", 1.0),
        sums=Sums.of(difference),
        by={
            "replica": _sums_by(replicas, of_replica, difference),
            "version": _sums_by(versions, of_version, difference),
        },
        replicas=_sums_by(replicas, of_replica[counts], difference[counts]),
        versions=_sums_by(versions, of_version[counts], difference[counts]),
        moments=np.array([len(s), s.sum(), d.sum(), (s * s).sum(), (s * d).sum(), (d * d).sum()]),
        unmasked=0 if report.mask is None else int((report.mask & ~is_trained[places]).sum()),
        other_token=_other_token(messages, report),
    )
    return result, {
        **result.sums.fields,
        "logprobs": packed_logprobs((sampled + difference).tolist()),
        "start": int(is_compared[: places[0]].sum()),
        "weight_version": report.weight_version,
    }


def _places_of(
    report: TrainerReport, is_generated: NDArray[np.bool_], is_trained: NDArray[np.bool_], prompt: int
) -> NDArray[np.intp]:
    """The places in the log of what was reported: those from `start` on; or all tokens, all but the first, those after
    the prompt, those that were generated, or those of them that may be trained. Where two of these are as many they are
    the same."""
    total, count = len(is_generated), len(report.logprobs)
    if report.mask is not None and len(report.mask) != count:
        raise ReportRefused(f"mask has {len(report.mask)} values for {count} logprobs: send as many")
    everything = np.arange(total)
    if report.start is not None:
        if not 0 <= report.start <= total - count:
            raise ReportRefused(f"{count} logprobs from token {report.start} on for a rollout of {total} tokens")
        return everything[report.start : report.start + count]
    for places in (everything[is_trained], everything[is_generated], everything[prompt:], everything[1:], everything):
        if len(places) == count:
            return places
    raise ReportRefused(
        f"{count} logprobs for a rollout of {int(is_generated.sum())} generated tokens, {total - prompt} after its "
        f"prompt and {total} in all: send one for each token of one of these, or say at which token they `start`"
    )


def _other_token(messages: Sequence[Mapping[str, Any]], report: TrainerReport) -> int | None:
    if report.token_ids is None:
        return None
    # The end of the log that a report with a `start` leaves out is not compared either.
    end = None if report.start is None else report.start + len(report.logprobs)
    own = [*chain.from_iterable(message["token_ids"] for message in messages)][:end]
    theirs = report.token_ids.tolist()[:end]
    if own == theirs:
        return None
    pairs = enumerate(zip(own, theirs, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(own), len(theirs)))


def _versions_of(messages: Sequence[Mapping[str, Any]], latest: Mapping[str, int]) -> Iterator[_Span]:
    """The spans of versions in the log; those that were never served are unknown: a caller may have posted the log."""
    for index, message in enumerate(messages):
        for span in message.get("weight_versions") or ():
            name, _, number = span["version"].rpartition("/")
            # Versions of a policy only increase. Without a leading zero, a version has one label.
            is_number = number.isdecimal() and number == str(int(number[:MOST_DIGITS]))
            is_served = is_number and int(number) <= latest.get(name, -1)
            yield index, span["start"], span["end"], span["version"] if is_served else UNKNOWN


def _labels_of(spans: Iterable[_Span], begins: Sequence[int]) -> tuple[list[str], NDArray[np.intp]]:
    """Labels, and for each token of the log the index of its own; tokens in no span are unknown.

    Args:
        begins: where each message begins in the log, and where the last one ends.
    """
    indices, of_token = {UNKNOWN: 0}, np.zeros(begins[-1], np.intp)
    for message, start, end, label in spans:
        if label and len(indices) <= MOST_LABELS:
            indices.setdefault(label, len(indices))
        begin = begins[message]
        of_token[begin + start : min(begin + end, begins[message + 1])] = indices.get(label, 0)
    return [*indices], of_token


def _sums_by(labels: Sequence[str], of_token: NDArray[np.intp], differences: Floats) -> dict[str, Sums]:
    return {labels[index]: Sums.of(differences[of_token == index]) for index in np.unique(of_token).tolist()}
