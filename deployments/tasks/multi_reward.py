"""Judges each reply by several environments, and weights what they give."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from rollout_env import ChatMessage, ChatModel, RewardModel, StepOutcome, TaskEnvironment
from rollout_env.environment import has_a_start, has_sessions
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment, load_environment_class
from rollout_env.steps import call, validated_step


class EnvironmentPart(BaseModel):
    """An environment within another one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    import_path: str
    """`package.module:Class` of its `TaskEnvironment`, which must have neither a start nor sessions."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""

    @model_validator(mode="after")
    def can_be_made(self) -> Self:
        try:
            environment_class = load_environment_class(self.import_path)
            checked_arguments(environment_class, self.arguments, self.import_path)
        except EnvironmentNotLoadable as error:
            raise ValueError(str(error)) from error
        if has_a_start(environment_class) or has_sessions(environment_class):
            raise ValueError(f"{self.import_path} has a start or sessions, which a part cannot have")
        return self


class _PartSettings(EnvironmentPart):
    """One environment among several."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of its rewards."""
    judges_cut_replies: bool = True
    """False gives it a reward of 0 for a reply that its length has cut (`finish_reason: length`), whatever it finds
    there: an unfinished reply is then neither right nor wrong."""
    in_reward: bool = True
    """False makes metrics of its rewards, as of a judge that the policy is not trained on: where the policy exploits
    the others, their rewards rise and this one's do not."""


def _refuse_name_of_a_field(parts: dict[str, _PartSettings]) -> dict[str, _PartSettings]:
    """Returns `parts`. Raises `ValueError` if one has the name of the field that is there beside them."""
    if "ended" in parts:
        raise ValueError("a part cannot be named 'ended', which is a field of extra_env_info: give it another name")
    return parts


Parts = Annotated[dict[str, _PartSettings], Field(min_length=1), AfterValidator(_refuse_name_of_a_field)]


class WrappingEnvironment(TaskEnvironment):
    """An environment that steps others, which may ask all of its models and end with it."""

    wrapped: Collection[TaskEnvironment]

    def use_models(self, chat_models: Mapping[str, ChatModel], reward_models: Mapping[str, RewardModel]) -> None:
        super().use_models(chat_models, reward_models)
        for environment in self.wrapped:
            environment.use_models(chat_models, reward_models)

    async def close(self) -> None:
        for environment in self.wrapped:
            await call(environment.close)


class MultiRewardEnvironment(WrappingEnvironment):
    """The first part leads: its observation is the answer, and the rollout ends with it. The others only judge.

    `extra_env_info` has one object for each part, by its name; that of a part without required fields may be missing.
    Rewards are named after their parts: `math`, or `math/correctness` where a part names its own. A part that has ended
    judges no further reply.
    """

    description: ClassVar[str] = "Replies that several environments judge."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = BaseModel

    def __init__(self, parts: Parts) -> None:
        """Loads the environments of `parts`, by name; the first one leads."""
        self._parts = parts
        self._environments = {name: load_environment(part.import_path, part.arguments) for name, part in parts.items()}
        self.wrapped = self._environments.values()
        self._leader = next(iter(parts))
        self.tools = self._environments[self._leader].tools
        limits = [part.max_concurrent_steps for part in self._environments.values() if part.max_concurrent_steps]
        self.max_concurrent_steps = min(limits, default=None)
        weights = [
            f"{name} (weight {part.weight:g}): {self._environments[name].description}" for name, part in parts.items()
        ]
        self.description = f"Several judges of one reply. {'; '.join(weights)}"  # type: ignore[misc]
        self.ExtraEnvInfo = _fields_of(self._environments)  # type: ignore[misc]

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        """Raises what a part raises; the steps of the others are cancelled then."""
        given: dict[str, Any] = extra_env_info.model_dump(exclude_unset=True)
        ended: list[str] = list(given.get("ended", []))
        state = {name: given.get(name, {}) for name in self._environments}
        judging = [name for name in self._environments if name not in ended]
        steps = [
            asyncio.ensure_future(
                validated_step(self._environments[name], [one.copy() for one in message_log], state[name])
            )
            for name in judging
        ]
        try:
            outcomes = dict(zip(judging, await asyncio.gather(*steps), strict=True))
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)
        is_cut = message_log[-1].get("finish_reason") == "length"
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for name, outcome in outcomes.items():
            part = self._parts[name]
            state[name] = state[name] if outcome.metadata is None else outcome.metadata
            is_skipped = is_cut and not part.judges_cut_replies
            given_to = rewards if part.in_reward else metrics
            for reward, value in (outcome.reward if isinstance(outcome.reward, dict) else {"": outcome.reward}).items():
                given_to[f"{name}/{reward}".rstrip("/")] = 0.0 if is_skipped else part.weight * value
            metrics |= {f"{name}/{metric}": value for metric, value in (outcome.metrics or {}).items()}
        leading = outcomes[self._leader]
        ended += [name for name, outcome in outcomes.items() if outcome.terminated and name != self._leader]
        return StepOutcome(
            observation=leading.observation,
            reward=rewards,
            terminated=leading.terminated,
            metadata={**state, "ended": ended},
            next_stop_strings=leading.next_stop_strings,
            answer=leading.answer,
            metrics=metrics,
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The prompts of the first part, with the `extra_env_info` of each part's own examples."""
        by_part = {name: part.example_samples(count, seed) for name, part in self._environments.items()}
        return [
            {
                **by_part[self._leader][place],
                "extra_env_info": {name: samples[place]["extra_env_info"] for name, samples in by_part.items()},
            }
            for place in range(count)
        ]


def _fields_of(environments: dict[str, TaskEnvironment]) -> type[BaseModel]:
    """A model with a field for the `extra_env_info` of each part."""
    fields: dict[str, Any] = {name: (part.ExtraEnvInfo, field_of(part)) for name, part in environments.items()}
    _, *others = environments
    ended: Any = list[Literal[tuple(others)]] if others else Annotated[list[str], Field(max_length=0)]  # type: ignore[misc]
    return create_model(
        "MultiRewardInfo",
        __config__=ConfigDict(extra="forbid"),
        ended=(ended, Field(default=[], description="Parts that judge no further reply; the service sets it.")),
        **fields,
    )


def field_of(part: TaskEnvironment) -> Any:
    """The object of a part may be missing where it would be valid without a field."""
    is_required = any(field.is_required() for field in part.ExtraEnvInfo.model_fields.values())
    return ... if is_required else Field(default={}, validate_default=True)
