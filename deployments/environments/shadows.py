"""Shadow judges: further environments that judge each reply of a task, and whose verdicts are in no reward.

A judge that a policy is not trained on shows where the policy exploits the one that it is trained on (reward hacking):
then the reward rises and the verdict does not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from deployments.protocols.environments import ShadowedOutcome, StepRequest
from deployments.strict_settings import StrictSettings
from rollout_env import ChatModel, RewardModel, StepOutcome, TaskEnvironment
from rollout_env.environment import has_a_start, has_sessions
from rollout_env.loading import (
    EnvironmentNotLoadable,
    checked_arguments,
    load_environment,
    load_environment_class,
)
from rollout_env.steps import validated_step

MOST_JUDGED_AT_ONCE = 64
"""Default limit for each judge: a plain `step` takes a thread."""
logger = logging.getLogger("rollout_service.environments")


class ShadowSettings(StrictSettings):
    """A further judge of a task."""

    import_path: str
    """`package.module:Class` of its `TaskEnvironment`, which must have neither a start nor sessions."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of its reward, which brings it to the scale of the task's."""
    parts_at: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """The verdict has parted from a rollout's total reward if it differs from it by more."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after which a judge has given no verdict; at most half of `limits.step_timeout_s`."""


def refuse_unloadable(settings: ShadowSettings) -> None:
    """Raises `EnvironmentNotLoadable` if the judge cannot be made, or needs what a judge cannot have."""
    environment_class = load_environment_class(settings.import_path)
    checked_arguments(environment_class, settings.arguments, settings.import_path)
    if has_a_start(environment_class) or has_sessions(environment_class):
        raise EnvironmentNotLoadable(f"{settings.import_path} has a start or sessions, which a shadow cannot have.")


class ShadowJudge:
    """One judge. It sees of `extra_env_info` what it has fields for, as the task has it before the step."""

    def __init__(self, name: str, settings: ShadowSettings, step_timeout_s: float | None) -> None:
        """Raises `EnvironmentNotLoadable`."""
        refuse_unloadable(settings)
        self.name = name
        self.environment: TaskEnvironment = load_environment(settings.import_path, settings.arguments)
        self._weight = settings.weight
        self._timeout_s = min(settings.timeout_s, step_timeout_s / 2) if step_timeout_s else settings.timeout_s
        self._slots = asyncio.Semaphore(self.environment.max_concurrent_steps or MOST_JUDGED_AT_ONCE)
        self._logged: set[str] = set()

    async def verdict(self, request: StepRequest) -> float | None:
        """Its reward of the reply; `None` if it has failed, or did not answer in time."""
        messages = [message.copy() for message in request.message_log]
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                outcome = await validated_step(self.environment, messages, self._own_fields(request.extra_env_info))
        except BaseException as error:  # all that a judge raises, SystemExit too, is a verdict that is missing
            task = asyncio.current_task()
            if isinstance(error, KeyboardInterrupt) or (task is not None and task.cancelling()):
                raise
            self._log(error, request)
            return None
        reward = outcome.reward
        return self._weight * (sum(reward.values()) if isinstance(reward, dict) else reward)

    def _own_fields(self, extra_env_info: Mapping[str, Any]) -> dict[str, Any]:
        model = self.environment.ExtraEnvInfo
        if model.model_config.get("extra") != "forbid":
            return dict(extra_env_info)
        names = {alias for name, field in model.model_fields.items() for alias in (name, field.alias)}
        return {name: value for name, value in extra_env_info.items() if name in names}

    def _log(self, error: BaseException, request: StepRequest) -> None:
        """Logs one traceback for each kind of failure: a judge that is away fails at every step."""
        kind = type(error).__name__
        traceback_of = None if kind in self._logged else error
        self._logged.add(kind)
        context = {"request_id": request.request_id, "rollout_id": request.rollout_id}
        logger.warning(
            "The shadow %s gave no verdict: %s %s", self.name, kind, error, exc_info=traceback_of, extra=context
        )


class Shadows:
    """All shadow judges of a task. None of their failures is one of the step."""

    def __init__(self, settings: Mapping[str, ShadowSettings], step_timeout_s: float | None) -> None:
        """Raises `EnvironmentNotLoadable`."""
        self._judges = [ShadowJudge(name, each, step_timeout_s) for name, each in settings.items()]
        self.environments = [judge.environment for judge in self._judges]

    def use_models(self, chat_models: Mapping[str, ChatModel], reward_models: Mapping[str, RewardModel]) -> None:
        """Every judge may ask all models of the task."""
        for environment in self.environments:
            environment.use_models(chat_models, reward_models)

    def beside(
        self, step: Callable[[StepRequest], Awaitable[StepOutcome]]
    ) -> Callable[[StepRequest], Awaitable[StepOutcome]]:
        """A step during which the shadows judge too; `step` itself if there are none. What it raises ends them."""

        async def judged_step(request: StepRequest) -> StepOutcome:
            verdicts = asyncio.gather(*(judge.verdict(request) for judge in self._judges))
            try:
                outcome = await step(request)
                found = await verdicts
            finally:
                verdicts.cancel()
            given = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
            by_name = {judge.name: verdict for judge, verdict in zip(self._judges, found, strict=True)}
            return ShadowedOutcome(**given, shadow_rewards=by_name)

        return judged_step if self._judges else step
