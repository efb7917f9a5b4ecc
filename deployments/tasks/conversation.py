"""A conversation with a user, which another environment judges when the user has ended it."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from deployments.tasks.multi_reward import EnvironmentPart, WrappingEnvironment, field_of
from rollout_env import (
    ChatMessage,
    SimulatedUser,
    StepOutcome,
    UserScenario,
    UserTurn,
    tool_calls_of,
)
from rollout_env.loading import load_environment
from rollout_env.steps import validated_step

FollowUp = Annotated[str, Field(min_length=1)]


class ConversationEnvironment(WrappingEnvironment):
    """The user answers each reply that makes no calls; when they have ended the conversation, the judge steps once.

    Calls are the judge's, where it has tools. `extra_env_info` has its fields under `judge`, and may say the user's
    `goal` and `persona`. Without a `user_simulator` the user says `follow_ups`.
    """

    ExtraEnvInfo: ClassVar[type[BaseModel]] = BaseModel

    def __init__(self, judge: EnvironmentPart, follow_ups: list[FollowUp] | None = None) -> None:
        """Loads the judge.

        Args:
            judge: an environment whose step on a reply without calls ends its rollout.
            follow_ups: what a user without a model says, one message after each reply.
        """
        self._judge = load_environment(judge.import_path, judge.arguments)
        self.wrapped = [self._judge]
        self._user: SimulatedUser | None = None
        self._follow_ups = follow_ups or []
        self.tools = self._judge.tools
        self.max_concurrent_steps = self._judge.max_concurrent_steps
        self.description = f"A conversation with a user. {self._judge.description}"  # type: ignore[misc]
        self.ExtraEnvInfo = create_model(  # type: ignore[misc]
            "ConversationInfo",
            __config__=ConfigDict(extra="forbid"),
            goal=(str, Field(default="", description="What the user wants; by default that of the config.")),
            persona=(str, Field(default="", description="Who the user is; by default that of the config.")),
            turns=(int, Field(default=0, ge=0, description="Messages of the user so far; the service sets it.")),
            judge=(self._judge.ExtraEnvInfo, field_of(self._judge)),
        )

    def use_user(self, user: SimulatedUser) -> None:
        """Lets this user talk, in place of the follow-ups."""
        self._user = user

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        """Raises what user and judge raise."""
        given: dict[str, Any] = extra_env_info.model_dump(exclude_unset=True)
        of_judge = given.get("judge", {})
        if self.tools and tool_calls_of(message_log[-1]):
            outcome = await validated_step(self._judge, message_log, of_judge)
            return replace(outcome, metadata={**given, "judge": outcome.metadata or of_judge})
        turn = await self._turn(message_log, extra_env_info)
        said: list[ChatMessage] = [{"role": "user", "content": turn.content}] if turn.content else []
        if not turn.has_ended:
            state = {**given, "turns": extra_env_info.turns + 1}
            return StepOutcome(said, 0.0, terminated=False, metadata=state, metrics=turn.metrics)
        outcome = await validated_step(self._judge, message_log, of_judge)
        return replace(
            outcome,
            observation=[*said, *outcome.observations] or None,
            terminated=True,
            metadata={**given, "judge": outcome.metadata or of_judge},
            metrics={**(outcome.metrics or {}), **turn.metrics},
        )

    async def _turn(self, message_log: list[ChatMessage], info: Any) -> UserTurn:
        if self._user is not None:
            return await self._user.turn(message_log, UserScenario(info.goal, info.persona))
        follow_up = next(iter(self._follow_ups[info.turns :]), "")
        return UserTurn(follow_up, has_ended=not follow_up)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Those of the judge."""
        return [
            {**sample, "extra_env_info": {"judge": sample["extra_env_info"]}}
            for sample in self._judge.example_samples(count, seed)
        ]
