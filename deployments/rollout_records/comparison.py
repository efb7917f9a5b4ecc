"""Compares the log-probabilities that a trainer computed with those that a rollout was sampled with, token by token.

No I/O.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.rollout_records.ratios import LARGEST_DIFFERENCE, Floats, Sums, sums_by
from rollout_client.contract.training import may_be_compared, may_be_trained

HEAD_TOKENS = 4
"""So many tokens at the beginning of a message are counted apart: another prompt changes them the most."""
BATCH_BOUNDS = (1, 8, 32, 128)
UNKNOWN = "unknown"
MOST_VERSIONS = 32
"""Versions of one rollout that are told apart."""
MOST_DIGITS = 18


class LabelledTokens(NamedTuple):
    """Tokens `[start, end)` of those that are compared have this label."""

    start: int
    end: int
    label: str


class ReportRefused(Exception):
    """The report does not fit the rollout; the message is a sentence for the trainer."""


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


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRollout:
    """A rollout beside a report about it. Arrays have an element for each token of the report that may be trained and
    was sampled as the request says, in the order of the log."""

    rollout_id: str
    group: str
    """The `group_id` of its record."""
    sampled: Floats
    """The log-probabilities that it was sampled with."""
    difference: Floats
    """The trainer's less `sampled`, at most `LARGEST_DIFFERENCE` in size."""
    labels: Mapping[str, Sequence[LabelledTokens]]
    """By attribute, such as `replica`, the values of the tokens: spans that cover all of them, in order."""
    temperature: float
    stated_version: str | None
    unmasked: int
    """Tokens that may not be trained, and that the trainer's mask has in the loss."""
    other_token: tuple[int, int] | None
    """The first token that the trainer has another id for: index of its message, and place within it."""
    start: int = 0
    """How many such tokens come before the report's."""

    @property
    def tokens(self) -> int:
        return len(self.sampled)

    @property
    def sums(self) -> Sums:
        return Sums.of(self.difference)

    def sums_by(self, attribute: str) -> dict[str, Sums]:
        """By the values of the attribute."""
        spans = self.labels[attribute]
        return sums_by([one.label for one in spans], [one.end - one.start for one in spans], self.difference)


def compared(record: Mapping[str, Any], report: TrainerReport, latest: Mapping[str, int]) -> ComparedRollout:
    """Compares a report with the record of its rollout.

    Args:
        record: the fields of a `RolloutRecord`.
        latest: the latest version of each policy, as `served_alone` takes it.

    Raises:
        ReportRefused: it has another number of tokens than the rollout, or a number that is not finite.
    """
    rollout = record["rollout"]
    messages = rollout["message_log"]
    sizes = [len(message["token_ids"]) for message in messages]
    generated = [message.get("generation_logprobs") is not None for message in messages]
    looked_at = [may_be_compared(message) for message in messages]
    is_generated, is_trained, is_compared = (
        np.repeat(np.array(flags, bool), sizes)
        for flags in (generated, [may_be_trained(message) for message in messages], looked_at)
    )
    sampled = np.fromiter(
        chain.from_iterable(message["generation_logprobs"] for message in compress(messages, looked_at)), np.float64
    )
    prompt = sum(sizes[: generated.index(True)] if any(generated) else sizes)
    places = places_of(report, is_generated, is_trained, prompt)
    given = report.logprobs[is_compared[places]]
    first = int(is_compared[: places[0]].sum()) if len(places) else 0
    sampled = sampled[first : first + len(given)]
    if not np.isfinite(given).all():
        raise ReportRefused("a log-probability of a trained token is not a finite number: send what was computed")
    replay = rollout.get("replay") or {}
    labels = labels_of(record, messages, looked_at, replay.get("engine", ""))
    labels["version"] = served_alone(labels["version"], latest)
    return ComparedRollout(
        rollout_id=report.rollout_id,
        group=record["group_id"],
        sampled=sampled,
        difference=np.clip(given - sampled, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE),
        labels={name: cut(spans, first, first + len(given)) for name, spans in labels.items()},
        temperature=replay.get("temperature", 1.0),
        stated_version=report.weight_version,
        unmasked=0 if report.mask is None else int((report.mask & ~is_trained[places]).sum()),
        other_token=other_token(messages, report),
        start=first,
    )


def places_of(
    report: TrainerReport, is_generated: NDArray[np.bool_], is_trained: NDArray[np.bool_], prompt: int
) -> NDArray[np.int64]:
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


def other_token(messages: Sequence[Mapping[str, Any]], report: TrainerReport) -> tuple[int, int] | None:
    theirs = report.token_ids
    if theirs is None:
        return None
    own = np.fromiter(chain.from_iterable(message["token_ids"] for message in messages), np.int64)
    if report.start is not None:
        # The end of the log that a report leaves out is not compared either.
        end = report.start + len(report.logprobs)
        own, theirs = own[:end], theirs[:end]
    common = min(len(own), len(theirs))
    others = np.flatnonzero(own[:common] != theirs[:common])
    if not len(others) and len(own) == len(theirs):
        return None
    place = int(others[0]) if len(others) else common
    ends = np.cumsum([len(message["token_ids"]) for message in messages])
    index = min(int(np.searchsorted(ends, place, "right")), len(messages) - 1)
    return index, place - int(ends[index] - len(messages[index]["token_ids"]))


def labels_of(
    record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], looked_at: Sequence[bool], engine: str
) -> dict[str, list[LabelledTokens]]:
    """The attributes of where and how each token of the messages that are looked at was made."""
    labels: dict[str, list[LabelledTokens]] = {name: [] for name in ("version", "position", *OF_GENERATION)}
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for made in record["generations"]:
        parts.setdefault(made["message"], []).append(made)
    begin = 0
    for index, message in enumerate(messages):
        if not looked_at[index]:
            continue
        end = begin + len(message["token_ids"])
        spans = message.get("weight_versions") or ()
        label(labels["version"], begin, end, [(one["start"], one["end"], one["version"]) for one in spans])
        for name, value_of in OF_GENERATION.items():
            made_by = parts.get(index, ())
            label(labels[name], begin, end, [(made["start"], made["end"], value_of(made)) for made in made_by])
        label(labels["position"], begin, end, [(0, HEAD_TOKENS, "head"), (HEAD_TOKENS, end - begin, "rest")])
        begin = end
    label(labels.setdefault("policy", []), 0, begin, [(0, begin, record.get("policy") or "unnamed")])
    label(labels.setdefault("engine", []), 0, begin, [(0, begin, engine)])
    return labels


def served_alone(labels: Sequence[LabelledTokens], latest: Mapping[str, int]) -> list[LabelledTokens]:
    """The versions of tokens, of which those that never were served are unknown: a caller may have posted the log.

    Args:
        latest: the latest version of each policy that is served, by name; that of the policy without one is under ''.
    """
    served = [version for version in dict.fromkeys(one.label for one in labels) if is_served(version, latest)]
    told = set(served[:MOST_VERSIONS])
    kept: list[LabelledTokens] = []
    for start, end, version in labels:
        name = version if version in told else UNKNOWN
        begin = kept.pop().start if kept and kept[-1].label == name else start
        kept.append(LabelledTokens(begin, end, name))
    return kept


def is_served(label: str, latest: Mapping[str, int]) -> bool:
    name, _, number = label.rpartition("/")
    # Versions of a policy only increase. Without a leading zero, a version has one label.
    return number.isdecimal() and number == str(int(number[:MOST_DIGITS])) and int(number) <= latest.get(name, -1)


def cut(labels: Sequence[LabelledTokens], start: int, end: int) -> list[LabelledTokens]:
    """The spans of the tokens `[start, end)`, which count from `start`."""
    inside = [(max(one.start, start), min(one.end, end), one.label) for one in labels]
    return [LabelledTokens(begin - start, stop - start, name) for begin, stop, name in inside if begin < stop]


def label(labels: list[LabelledTokens], begin: int, end: int, spans: Sequence[tuple[int, int, str]]) -> None:
    """Labels the tokens `[begin, end)`. `spans` count from `begin`, in order; tokens in none of them are unknown."""
    at = begin
    for span_start, span_end, name in spans:
        start, stop = max(begin + span_start, at), min(begin + span_end, end)
        if at < start:
            labels.append(LabelledTokens(at, start, UNKNOWN))
        if start < stop:
            labels.append(LabelledTokens(start, stop, name or UNKNOWN))
            at = stop
    if at < end:
        labels.append(LabelledTokens(at, end, UNKNOWN))


def crossed(one: Sequence[LabelledTokens], other: Sequence[LabelledTokens]) -> Iterator[tuple[int, int, str, str]]:
    """The spans in which both labels stay the same, in order: start, end, and both labels."""
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i].start, other[j].start), min(one[i].end, other[j].end)
        if start < end:
            yield start, end, one[i].label, other[j].label
        i, j = i + (one[i].end == end), j + (other[j].end == end)


def batch_label(made: Mapping[str, Any]) -> str:
    size = made["batch_size"]
    if not size:
        return UNKNOWN
    low = 1
    for bound in BATCH_BOUNDS:
        if size <= bound:
            return str(bound) if low == bound else f"{low}-{bound}"
        low = bound + 1
    return f"{low} or more"


OF_GENERATION = {
    "replica": lambda made: made["replica"],
    "node": lambda made: made["node"],
    "prefix_cache": lambda made: "hit" if made["cached_tokens"] else "miss",
    "batch_size": batch_label,
}
