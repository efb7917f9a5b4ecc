"""Bases and helpers that several tasks and bridges share."""

import importlib
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from rollout_env import ChatMessage, SampleRejected, Session, StepOutcome, TaskEnvironment, reply_text
from rollout_env.worker_pool import WorkerPool

_LOST_AFTER_S = 90.0
"""Wall time after which a call of a worker without a result is given up, and its step tried again."""
_CLOSE = 1e-9
"""Difference of floats that count as equal, relative to their size where that is above 1."""


class GameInfo(BaseModel):
    """The `extra_env_info` of a game that is made from a seed; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    seed: int = Field(ge=0, lt=2**31)
    """The seed of the game."""
    prompt_messages: int = Field(default=0, ge=0)
    """Messages of the prompt before the first observation; set by the start."""


class GameSession(Session):
    """A game in memory. Its seed and the replies so far bring another one to where it stands."""

    is_over = False

    @abstractmethod
    def play(self, reply: str) -> StepOutcome:
        """Makes the move of a reply."""

    def replayed(self, message_log: list[ChatMessage], info: GameInfo) -> Self:
        """The game after the replies that the log has already."""
        for message in message_log[info.prompt_messages :]:
            if message["role"] == "assistant":
                self.play(reply_text(message))
        return self

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:  # noqa: ARG002
        """Makes the move of the last reply.

        Raises:
            SampleRejected: the game is over.
        """
        if self.is_over:
            raise SampleRejected("The game is over.")
        return self.play(reply_text(message_log[-1]))


def seeds_from(seed: int, count: int) -> range:
    """Seeds of `count` example samples, below 2^31."""
    first = random.Random(seed).randrange(2**30)
    return range(first, first + count)


class PooledEnvironment(TaskEnvironment):
    """An environment whose computations run in worker processes."""

    def start_pool(
        self,
        workers: int | None,
        steps_per_worker: int,
        prepare: Callable[[], None],
        preloaded: Sequence[str],
    ) -> None:
        """Starts the workers in the background.

        Args:
            workers: how many; None for the `num_cpus` that Ray reserves for the replica, rounded up.
            steps_per_worker: how many steps of each run at once; all but one wait for it.
            prepare: called once in each worker before its first call.
            preloaded: names of modules that are imported before the workers are forked.
        """
        workers = assigned_cores() if workers is None else workers
        self.max_concurrent_steps = steps_per_worker * workers
        self.pool = WorkerPool(workers, prepare, preloaded, _LOST_AFTER_S)

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()


def assigned_cores() -> int:
    """The `num_cpus` of the replica, rounded up to whole cores and at least 1; 1 outside of a replica."""
    # Worker processes are forked from a process that has imported the task's module: they need no Ray.
    import ray

    if not ray.is_initialized():
        return 1
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return 1
    resources: dict[str, float] = context.get_assigned_resources()  # type: ignore[no-untyped-call]
    return max(1, math.ceil(resources.get("CPU", 0.0)))


class PackageMissing(Exception):
    """The message says how the package is installed."""


def imported(module_name: str, package: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        PackageMissing: the package is not installed.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise PackageMissing(
            f"the package {package} is missing: install the extra `bridges` of the service on each node "
            "(pip install --no-deps --require-hashes -r requirements/bridges.lock)"
        ) from error


def json_equal(value: Any, expected: Any) -> bool:
    """Equality of JSON, where true is not 1 and floats may differ by rounding."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and (value == expected or math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE))
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(json_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(json_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)
