"""Environments that can be loaded, and others that cannot, each for one reason."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from tests.fakes.environment import StepsAlone


class Word(BaseModel):
    word: str = ""


class Loadable(StepsAlone):
    """Says its greeting."""

    description = "Says hello."
    ExtraEnvInfo = Word

    def __init__(self, greeting: str, repeats: int = 1) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}.")
        self.greeting = greeting * repeats

    async def step(self, message_log: list[ChatMessage], extra_env_info: Word) -> StepOutcome:
        raise NotImplementedError


class WithoutMethods(TaskEnvironment):
    description = "Has no methods."
    ExtraEnvInfo = Word


class WithoutDescription(Loadable):
    description = None  # type: ignore[assignment]


class WithoutExtraEnvInfo(Loadable):
    ExtraEnvInfo = dict  # type: ignore[assignment]


class Judge(BaseModel):
    url: str
    retries: int = Field(default=0, ge=0)


class Judged(Loadable):
    """Without fault: its arguments are more than texts and numbers."""

    def __init__(self, judge: Judge, weights: dict[str, Annotated[float, Field(le=1)]], **further: Any) -> None:
        super().__init__(judge.url)
