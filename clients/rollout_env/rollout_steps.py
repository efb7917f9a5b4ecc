"""Steps one rollout without the service, as the replicas of the service step it."""

from collections.abc import Sequence
from typing import Any

from rollout_env.calls import call
from rollout_env.environment import TaskEnvironment, has_sessions
from rollout_env.records import ChatMessage, StepOutcome
from rollout_env.session import Session
from rollout_env.steps import (
    opened_session,
    validated_extra_env_info,
    validated_outcome,
    validated_step,
)


class RolloutSteps:
    """The steps of one rollout, on several instances of its environment in turn, where it can move between them.

    A session stays with its instance, unless it can be opened again elsewhere: then each step has one of its own.
    """

    def __init__(self, instances: Sequence[TaskEnvironment], first: int = 0) -> None:
        """Args: `first` is the place of the instance that makes the first step."""
        self._instances = instances
        self._next = first
        self._has_sessions = has_sessions(type(instances[0]))
        self._session: Session | None = None

    async def step(self, message_log: list[ChatMessage], extra_env_info: dict[str, Any]) -> StepOutcome:
        """Runs one step, from `extra_env_info` as JSON to a valid outcome. Raises what `validated_step` raises."""
        environment = self._instances[self._next % len(self._instances)]
        self._next += 1
        if not self._has_sessions:
            return await validated_step(environment, message_log, extra_env_info)
        state = validated_extra_env_info(environment, extra_env_info)
        if environment.lost_session == "reopen" and len(self._instances) > 1:
            await self.close()
        if self._session is None:
            self._session = await opened_session(environment, message_log, state)
        return validated_outcome(await call(self._session.step, message_log, state))

    async def close(self) -> None:
        """Closes the session, if one is open. Raises what its `close` raises."""
        session, self._session = self._session, None
        if session is not None:
            await call(session.close)
