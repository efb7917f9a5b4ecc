"""The pushes under way: versions that have arrived completely and are being validated or loaded by the replicas.

Guarantee: there is at most one push of a version at a time; the same push sent again gets the result of the first.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Set
from dataclasses import dataclass
from typing import Any

from deployments.policy.failures import VersionRefused
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.policy_contract import PolicyUpdate
from rollout_client.problem_contract import FieldProblem


@dataclass(frozen=True, slots=True)
class ActivePush:
    content: str | None
    """Identifies the same push: the `weights_digest` that its sender says, or the checkpoint's location."""
    task: asyncio.Task[PolicyUpdate]


class ActivePushes(Set[int]):
    """A set of version numbers."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._pushes: dict[int, ActivePush] = {}

    async def run(self, version: int, content: str | None, work: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        """Runs `work` to its end, even if the caller is cancelled; returns or raises what it does."""
        task = self._tasks.start(work)
        self._pushes[version] = ActivePush(content, task)
        task.add_done_callback(lambda _: self._pushes.pop(version))
        return await asyncio.shield(task)

    @property
    def are_running(self) -> bool:
        """Whether one of them has not ended: those that have are in the set for another turn of the event loop."""
        return any(not push.task.done() for push in self._pushes.values())

    async def result_of_same(self, version: int, content: str) -> PolicyUpdate | None:
        """Waits for the push of the same version and content; `None` if there is none. Raises what the push does."""
        push = self._pushes.get(version)
        if push is None or push.content != content:
            return None
        return await asyncio.shield(push.task)

    def refuse_active(self, version: int) -> None:
        """Raises `VersionRefused` if a push of the version is under way."""
        if version in self._pushes:
            message = "all of it has arrived, and it is being validated and loaded by the replicas"
            raise VersionRefused(FieldProblem(field="version", message=message, value=version))

    def __contains__(self, version: object) -> bool:
        return version in self._pushes

    def __iter__(self) -> Iterator[int]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)
