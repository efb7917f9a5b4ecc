"""Compares the log-probabilities that a trainer computed with those that a rollout was sampled with, token by token.

No I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.rollout_records.ratios import LARGEST_DIFFERENCE, Floats, Sums, TokenLabels, sums_by
from rollout_client.contract.training import may_be_compared, may_be_trained

HEAD_TOKENS = 4
"""So many tokens at the beginning of a message are counted apart: another prompt changes them the most."""
BATCH_BOUNDS = (1, 8, 32, 128)
UNKNOWN = "unknown"
MOST_LABELS = 32
"""Values of one attribute that are told apart in one rollout: a posted log has as many versions as its caller likes."""


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
    labels: Mapping[str, TokenLabels[str]]
    """By attribute, such as `replica`, the value of each token."""
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
        return sums_by(self.labels[attribute], self.difference)


def compared(record: Mapping[str, Any], report: TrainerReport) -> ComparedRollout:
    """Compares a report with the record of its rollout.

    Args:
        record: the fields of a `RolloutRecord`.

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
    places = _places_of(report, is_generated, is_trained, prompt)
    given = report.logprobs[is_compared[places]]
    first = int(is_compared[: places[0]].sum()) if len(places) else 0
    sampled = sampled[first : first + len(given)]
    if not np.isfinite(given).all():
        raise ReportRefused("a log-probability of a trained token is not a finite number: send what was computed")
    replay = rollout.get("replay") or {}
    labels = _labels_of(record, messages, looked_at, replay.get("engine", ""))
    return ComparedRollout(
        rollout_id=report.rollout_id,
        group=record["group_id"],
        sampled=sampled,
        difference=np.clip(given - sampled, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE),
        labels={name: of_token.within(first, first + len(given)) for name, of_token in labels.items()},
        temperature=replay.get("temperature", 1.0),
        stated_version=report.weight_version,
        unmasked=0 if report.mask is None else int((report.mask & ~is_trained[places]).sum()),
        other_token=_other_token(messages, report),
        start=first,
    )


def _places_of(
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


def _other_token(messages: Sequence[Mapping[str, Any]], report: TrainerReport) -> tuple[int, int] | None:
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


def _labels_of(
    record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], looked_at: Sequence[bool], engine: str
) -> dict[str, TokenLabels[str]]:
    """The attributes of where and how each token of the messages that are looked at was made."""
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in ("version", "position", *OF_GENERATION)}
    begin = 0
    for index, message in enumerate(messages):
        if not looked_at[index]:
            continue
        end = begin + len(message["token_ids"])

        def add(name: str, start: int, stop: int, value: str, begin: int = begin, end: int = end) -> None:
            spans[name].append((begin + start, min(begin + stop, end), value))

        for one in message.get("weight_versions") or ():
            add("version", one["start"], one["end"], one["version"])
        for made in (made for made in record["generations"] if made["message"] == index):
            for name, value_of in OF_GENERATION.items():
                add(name, made["start"], made["end"], value_of(made))
        add("position", 0, HEAD_TOKENS, "head")
        add("position", HEAD_TOKENS, end, "rest")
        begin = end
    spans |= {"policy": [(0, begin, record.get("policy") or "unnamed")], "engine": [(0, begin, engine)]}
    return {name: _labelled(begin, of_attribute) for name, of_attribute in spans.items()}


def _labelled(count: int, spans: Sequence[tuple[int, int, str]]) -> TokenLabels[str]:
    """The labels of `count` tokens by spans, the first of which counts.

    Tokens in none of them, and those of further names than `MOST_LABELS`, are unknown.
    """
    codes: dict[str, int] = {}
    told = set(islice(dict.fromkeys(name for *_, name in spans if name), MOST_LABELS))
    of_span = [codes.setdefault(name if name in told else UNKNOWN, len(codes)) for *_, name in spans]
    of_token = np.full(count, -1, np.intp)
    for (start, end, _), code in zip(reversed(spans), reversed(of_span), strict=True):
        of_token[start:end] = code
    if (in_none := of_token < 0).any():
        of_token[in_none] = codes.setdefault(UNKNOWN, len(codes))
    return TokenLabels([*codes], of_token)


def _batch_label(made: Mapping[str, Any]) -> str:
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
    "batch_size": _batch_label,
}
