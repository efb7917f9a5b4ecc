"""The outcome of each response, and the totals of a process: rollouts, turns, tokens, and failures by kind. No I/O.

A kind of error is one of the contract: that of a failed rollout (`generation`, `environment`, ...), the name of a
problem document's type (`overloaded`, `not-ready`, ...), and besides `status-502` for a status without a problem,
`unreachable`, `stream-broken` and `not-understood`. There are few, so that locust can count failures by them.
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
    """One request, or one call of a session."""

    rollouts: int = 0
    """Those without error."""
    turns: int = 0
    tokens: int = 0
    """Generated ones."""
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    message: str | None = None
    """The first error in words."""
    retry_after_s: float | None = None

    @property
    def failure(self) -> str | None:
        """What locust shows: the kinds alone, because it keeps a line for each text."""
        return None if not self.errors else ", ".join(sorted(self.errors))

    def with_error(self, kind: str, message: str, retry_after_s: float | None = None) -> Self:
        self.errors[kind] += 1
        self.message = self.message or message
        self.retry_after_s = retry_after_s
        return self


def outcome_of_response(status: int, headers: Mapping[str, str], body: bytes, expected: int) -> LoadOutcome:
    """That of an answer of `POST /rollout` that should have `expected` rollouts; a status of 0 is no answer."""
    if status == 0:
        return LoadOutcome().with_error("unreachable", "The service did not answer.")
    if status != 200:
        return outcome_of_error(error_of_response(status, headers, body))
    try:
        samples = RolloutResponse.model_validate_json(body).samples
    except ValidationError as error:
        return LoadOutcome().with_error(
            "not-understood", f"The answer is no RolloutResponse: {error.errors()[0]['msg']}."
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
    """What a call was worth, and its answer; a call of the engine is a turn."""
    if status == 0:
        return LoadOutcome().with_error("unreachable", "The service did not answer."), None
    if not 200 <= status < 300:
        return outcome_of_error(error_of_response(status, headers, content)), None
    try:
        answer: Json = json.loads(content or b"{}")
        usage = answer.get("usage")
        outcome = LoadOutcome(turns=1, tokens=usage["completion_tokens"]) if usage else LoadOutcome()
    except (ValueError, LookupError, TypeError, AttributeError):
        return LoadOutcome().with_error("not-understood", "The answer is no JSON of the API."), None
    if answer.get("status") == "ended":
        outcome.rollouts, outcome.statuses = 1, Counter({"ended": 1})
    return outcome, answer


def outcome_of_error(error: RolloutError, so_far: LoadOutcome | None = None) -> LoadOutcome:
    """That of a request that failed as a whole, after the samples `so_far` of a stream."""
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
"""Tokens are summed by so many seconds of the clock, so that a soak can be compared with its begin."""
QUARTERS = 4


@dataclass(slots=True)
class LoadTotals:
    """Counts since the run began. Those of a worker are sent to the master and begin anew with each report."""

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
        for name in ("rollouts", "turns", "tokens", "pushes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("statuses", "errors", "slots"):
            getattr(self, name).update(getattr(other, name))

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def message(self) -> dict[str, Any]:
        """What a worker sends. Pairs, because msgpack as locust uses it takes no numbers as keys of a map."""
        counts = {name: getattr(self, name) for name in ("rollouts", "turns", "tokens", "pushes")}
        pairs = {name: [list(pair) for pair in getattr(self, name).items()] for name in ("statuses", "errors", "slots")}
        return counts | pairs

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "LoadTotals":
        statuses, errors, slots = (Counter(dict(message[name])) for name in ("statuses", "errors", "slots"))
        rollouts, turns, tokens, pushes = (message[name] for name in ("rollouts", "turns", "tokens", "pushes"))
        return cls(rollouts, turns, tokens, pushes, statuses, errors, slots)

    def last_quarter_over_first(self) -> float | None:
        """Tokens of the last quarter of the run by those of its first one; `None` if there are too few slots to say."""
        if not self.slots:
            return None
        first, last = min(self.slots), max(self.slots)
        # The slots at both ends are cut by the begin and the end of the run.
        whole = [self.slots[slot] for slot in range(first + 1, last)]
        size = len(whole) // QUARTERS
        if not size or not sum(whole[:size]):
            return None
        return sum(whole[-size:]) / sum(whole[:size])
