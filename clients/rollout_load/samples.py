"""Samples to post, of the tasks that the service has, read from it when a run starts."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_client import RolloutClient, RolloutError
from rollout_load.options import LoadOptions

SAMPLES_PER_TASK = 64
RETRIES = 3
Sample = dict[str, Any]


class NoSamples(Exception):
    """The service cannot be reached, or lacks a task of the run; the message is a sentence."""


class SamplePool:
    """Samples by task, one pool for all users of a process."""

    def __init__(self) -> None:
        self._by_task: Mapping[str, Sequence[Sample]] = {}
        self._tasks: tuple[str, ...] = ()
        self._long_tasks: tuple[str, ...] = ()

    def fill(self, url: str, options: LoadOptions) -> None:
        """Reads the samples from the service. Raises `NoSamples`."""
        seed = random.randrange(2**31)
        try:
            with RolloutClient(url, retries=RETRIES) as client:
                served = [task.task_name for task in client.tasks()]
                self._tasks = known(options.tasks or served, served)
                self._long_tasks = known(options.long_tasks or self._tasks, served)
                self._by_task = {
                    name: [
                        sample.model_dump(mode="json", exclude_none=True)
                        for sample in client.example_samples(name, SAMPLES_PER_TASK, seed)
                    ]
                    for name in {*self._tasks, *self._long_tasks}
                }
        except RolloutError as error:
            raise NoSamples(str(error)) from error

    def some(self, count: int) -> list[Sample]:
        """`count` samples of one task, drawn at random."""
        return random.choices(self._by_task[random.choice(self._tasks)], k=count)

    def long(self) -> Sample:
        """One sample for a rollout of many turns."""
        return random.choice(self._by_task[random.choice(self._long_tasks)])


def known(wanted: Sequence[str], served: Sequence[str]) -> tuple[str, ...]:
    """The wanted tasks. Raises `NoSamples` if the service lacks one of them."""
    if missing := [name for name in wanted if name not in served]:
        raise NoSamples(f"The service has no task {', '.join(missing)}; it has {', '.join(served)}.")
    if not wanted:
        raise NoSamples("The service has no task.")
    return tuple(wanted)
