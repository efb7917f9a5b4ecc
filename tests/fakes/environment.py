"""An environment without samples of its own, for those of tests that have steps alone."""

from typing import Any

from rollout_env import TaskEnvironment


class StepsAlone(TaskEnvironment):
    description = "Has steps alone."

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        raise NotImplementedError
