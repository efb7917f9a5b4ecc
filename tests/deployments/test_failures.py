"""How the failures of a sample are classified and reported."""

import json
import pickle
from typing import Any

import pytest
from pydantic_core import to_json

from deployments import failures
from deployments.failures import RolloutFailure, failure_of

CLASSES: list[type[RolloutFailure]] = [
    value for value in vars(failures).values() if isinstance(value, type) and issubclass(value, RolloutFailure)
]


def test_each_failure_has_a_kind_and_says_whether_a_retry_can_help() -> None:
    named: dict[tuple[str, bool], set[str]] = {}
    for failure in CLASSES:
        named.setdefault((failure.kind, failure.retryable), set()).add(failure.__name__)
    lost = {f"{store}Lost" for store in ("PolicyStore", "Store", "JobStore", "SessionStore", "RolloutRecords", "Data")}
    closed = {"EnvironmentLost", "EnvironmentShuttingDown", "SessionLost", "RestartableSessionLost", "AgentTimedOut"}
    assert named == {
        ("request", False): {"PromptRejected"},
        ("generation", False): {"GenerationRejected"},
        ("generation", True): {"GenerationLost", "ReplicaShuttingDown", "GenerationNotFinite"},
        ("environment", False): {"EnvironmentRejected", "EnvironmentBroken", "AgentFailed", "VerifierFailed"},
        ("environment", True): closed,
        ("policy", False): {"VersionReplaced", "TokensTooOld", "PolicyDropped"},
        ("policy", True): {"OtherVersionLoaded"},
        ("timeout", True): {"TurnTimedOut"},
        ("overload", True): {"Overloaded"},
        ("internal", False): {"RolloutFailure"},
        ("internal", True): lost | {"ImagesLost"},
    }


def test_only_some_failures_of_replicas_cost_no_retry() -> None:
    free = [failure.__name__ for failure in CLASSES if not failure.costs_a_retry]
    assert sorted(free) == ["EnvironmentShuttingDown", "OtherVersionLoaded", "ReplicaShuttingDown"]


@pytest.mark.parametrize("failure", CLASSES)
def test_a_failure_is_reported_by_its_kind_and_its_sentence_in_any_process(failure: type[RolloutFailure]) -> None:
    received: Any = pickle.loads(pickle.dumps(failure("It broke.")))
    assert (type(received), str(received)) == (failure, "It broke.")
    reported = {"kind": failure.kind, "message": "It broke.", "retryable": failure.retryable}
    assert failure_of(received).model_dump() == reported


def test_any_other_exception_is_internal_and_not_retryable() -> None:
    reported = {"kind": "internal", "message": "KeyError: 'x'", "retryable": False}
    assert failure_of(KeyError("x")).model_dump() == reported


@pytest.mark.parametrize("failure", [failures.EnvironmentBroken, ValueError])
def test_half_of_a_surrogate_pair_in_a_message_is_written_out(failure: type[Exception]) -> None:
    message = failure_of(failure("The reply holds \ud83d.")).message
    assert message.endswith("The reply holds \\ud83d.")
    assert json.loads(to_json(message)) == message
