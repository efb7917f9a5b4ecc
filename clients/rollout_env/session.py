"""What an environment holds for one rollout, where that cannot travel from replica to replica."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from rollout_env.records import ChatMessage, StepOutcome


class Session(ABC):
    """What one rollout holds: a socket, a sandbox, a game in memory. `TaskEnvironment.open_session` makes it.

    All its methods may be plain or async, as those of an environment. The steps of one session never overlap.
    """

    @abstractmethod
    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome | Awaitable[StepOutcome]:
        """Judges the response, which is the last message of `message_log`.

        Arguments and outcome are those of `TaskEnvironment.step`. A step that raises, times out or is aborted ends the
        session, because nobody knows how far it came.

        Raises:
            TemporaryFailure: what the session holds is lost, such as a dropped connection.
            SampleRejected: as in `TaskEnvironment.step`.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - some sessions are only memory
        """Releases what the session holds. Called once; a step that has timed out may still run in its thread."""
