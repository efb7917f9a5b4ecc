"""Outcomes of responses, and the totals of a process: rollouts, turns, tokens, and failures by kind. No I/O.

A kind of error is that of a failed rollout (`generation`, `environment`, ...), the name of a problem document's type
(`overloaded`, `not-ready`, ...), `status-502` for a status without a problem document, `unreachable`, `stream-broken`
or `not-understood`. Kinds are few, so that locust can count failures by them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ValidationError

from rollout_client import (
    ResponseNotUnderstood,
    RolloutError,
    RolloutResponse,
    SampleResult,
    ServiceUnreachable,
    StatusError,
    StreamBroken,
)
from rollout_client.errors import error_of_response

Json = dict[str, Any]
PROBLEM = "urn:rollout:problem:"
KINDS: Mapping[type[RolloutError], str] = {
    ServiceUnreachable: "unreachable",
    StreamBroken: "stream-broken",
    ResponseNotUnderstood: "not-understood",
}


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of one request, or of one call of a session."""

    rollouts: int = 0
    """Rollouts without error."""
    turns: int = 0
    tokens: int = 0
    """Generated tokens."""
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    message: str | None = None
    """Message of the first error."""
    retry_after_s: float | None = None

    @property
    def failure(self) -> str | None:
        """The kinds alone, because locust keeps a line for each text."""
        return None if not self.errors else ", ".join(sorted(self.errors))

    def with_error(self, kind: str, message: str, retry_after_s: float | None = None) -> Self:
        self.errors[kind] += 1
        self.message = self.message or message
        self.retry_after_s = retry_after_s
        return self


def outcome_of_response(status: int, headers: Mapping[str, str], body: bytes, expected: int) -> LoadOutcome:
    """Outcome of an answer of `POST /rollout` that should have `expected` rollouts."""
    if status != 200:
        return outcome_of_failure(status, headers, body)
    try:
        samples = RolloutResponse.model_validate_json(body).samples
    except ValidationError as error:
        return LoadOutcome().with_error(
            "not-understood", f"The answer is not a RolloutResponse: {error.errors()[0]['msg']}."
        )
    outcome = outcome_of_samples(samples)
    if len(samples) != expected:
        outcome.with_error("not-understood", f"The answer has {len(samples)} rollouts instead of {expected}.")
    return outcome


def outcome_of_samples(samples: Iterable[SampleResult]) -> LoadOutcome:
    outcome = LoadOutcome()
    for sample in samples:
        outcome.statuses[sample.status] += 1
        outcome.turns += sample.metrics.turn_count
        outcome.tokens += sample.metrics.assistant_tokens
        if sample.error is None:
            outcome.rollouts += 1
        else:
            outcome.with_error(sample.error.kind, sample.error.message)
    return outcome


def outcome_of_call(status: int, headers: Mapping[str, str], content: bytes) -> tuple[LoadOutcome, Json | None]:
    """Outcome of a call, and its answer; a call of the engine is a turn."""
    if not 200 <= status < 300:
        return outcome_of_failure(status, headers, content), None
    try:
        answer: Json = json.loads(content or b"{}")
        usage = answer.get("usage")
        outcome = LoadOutcome(turns=1, tokens=usage["completion_tokens"]) if usage else LoadOutcome()
    except (ValueError, LookupError, TypeError, AttributeError):
        return LoadOutcome().with_error("not-understood", "The answer is not JSON of the API."), None
    if answer.get("status") == "ended":
        outcome.rollouts, outcome.statuses = 1, Counter({"ended": 1})
    return outcome, answer


def outcome_of_failure(status: int, headers: Mapping[str, str], body: bytes) -> LoadOutcome:
    """Outcome of a response that is not a success; locust gives the status 0 where there was no response."""
    if status == 0:
        return LoadOutcome().with_error("unreachable", "The service did not answer.")
    return outcome_of_error(error_of_response(status, headers, body))


def outcome_of_error(error: RolloutError, so_far: LoadOutcome | None = None) -> LoadOutcome:
    """Outcome of a request that failed as a whole, after the samples `so_far` of a stream."""
    retry_after_s = error.retry_after_s if isinstance(error, StatusError) else None
    return (so_far or LoadOutcome()).with_error(kind_of(error), str(error), retry_after_s)


def kind_of(error: RolloutError) -> str:
    if isinstance(error, StatusError):
        name = error.problem.type.removeprefix(PROBLEM)
        return name if name != error.problem.type else f"status-{error.status}"
    for known, kind in KINDS.items():
        if isinstance(error, known):
            return kind
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


SLOT_S = 5
"""Seconds of the clock over which tokens are summed, so that the end of a soak can be compared with its beginning."""
QUARTERS = 4
COUNTS, COUNTERS = ("rollouts", "turns", "tokens", "pushes"), ("statuses", "errors", "slots")


@dataclass(slots=True)
class LoadTotals:
    """Counts since the run began. A worker sends its counts to the master and restarts from zero with each report."""

    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    pushes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slots: Counter[int] = field(default_factory=Counter)
    """Tokens by slot of the clock."""

    def add(self, outcome: LoadOutcome, now_s: float) -> None:
        self.rollouts += outcome.rollouts
        self.turns += outcome.turns
        self.tokens += outcome.tokens
        self.statuses += outcome.statuses
        self.errors += outcome.errors
        self.slots[int(now_s) // SLOT_S] += outcome.tokens

    def merge(self, other: "LoadTotals") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def message(self) -> dict[str, Any]:
        """A worker's report. Counters are pairs, because locust's msgpack takes no numbers as keys of a map."""
        pairs = {name: [list(pair) for pair in getattr(self, name).items()] for name in COUNTERS}
        return {name: getattr(self, name) for name in COUNTS} | pairs

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "LoadTotals":
        counters: dict[str, Any] = {name: Counter(dict(message[name])) for name in COUNTERS}
        return cls(**{name: message[name] for name in COUNTS}, **counters)

    def last_quarter_over_first(self) -> float | None:
        """Ratio of tokens in the last and the first quarter of the run; `None` if there are too few slots."""
        if not self.slots:
            return None
        first, last = min(self.slots), max(self.slots)
        # The first and the last slot are incomplete.
        whole = [self.slots[slot] for slot in range(first + 1, last)]
        size = len(whole) // QUARTERS
        if not size or not sum(whole[:size]):
            return None
        return sum(whole[-size:]) / sum(whole[:size])
