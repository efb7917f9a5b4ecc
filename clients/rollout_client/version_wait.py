"""Waits for a version of the policy by long polling: the service holds each question back for a while. No I/O."""

from http import HTTPStatus

from rollout_client.calls.policy import policy_call
from rollout_client.calls.rollouts import Call
from rollout_client.contract.policy import PolicyState, Version
from rollout_client.deadline import Deadline
from rollout_client.errors import RequestRejected, RolloutTimeout

LONGEST_QUESTION_S = 20.0
"""Seconds; proxies cut connections that are silent for 30 s or more."""
SHORTEST_PAUSE_S = 0.2
"""Seconds between two questions: a service that answers at once must not be asked in a tight loop."""
RESPONSE_S = 60.0
"""Added to the time for which the service holds the question back: a proxy may have to come back meanwhile."""


class VersionWait:
    """Asks for `version` or a newer one until it is current, for at most `timeout_s` seconds."""

    def __init__(self, version: Version, timeout_s: float) -> None:
        self._version = version
        self._deadline = Deadline(timeout_s)
        self._question_s = 0.0

    def call(self) -> Call[PolicyState]:
        """The next question."""
        self._question_s = min(self._left_s(), LONGEST_QUESTION_S)
        return policy_call(self._version, round(self._question_s, 3))

    @property
    def call_timeout_s(self) -> float:
        """Seconds that the last call may take, its retries included."""
        return self._question_s + RESPONSE_S

    def pause_s(self, error: RequestRejected) -> float:
        """Seconds to pause before the next question.

        Raises:
            RequestRejected: `error`, unless it says that the version is not current yet.
            RolloutTimeout: `timeout_s` is over.
        """
        if error.problem.status != HTTPStatus.CONFLICT:
            raise error
        if not (left_s := self._left_s()):
            raise RolloutTimeout(
                f"Version {self._version} was not current after {self._deadline.timeout_s:g} s. Check that somebody "
                "pushes it, or allow more with timeout_s."
            ) from error
        return min(left_s, SHORTEST_PAUSE_S)

    def _left_s(self) -> float:
        try:
            return self._deadline.left_s() or 0.0
        except RolloutTimeout:
            return 0.0
