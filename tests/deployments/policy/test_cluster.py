"""Actors and nodes of the Ray cluster that have ended."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, TaskUnschedulableError

from deployments.policy import cluster
from deployments.policy.cluster import RayCluster
from deployments.policy.commands import StoredFile


class EndedActor:
    """An actor, or a task, whose calls raise what Ray raises once it has ended."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.__ray_ready__ = self

    def options(self, **_: object) -> "EndedActor":
        return self

    async def remote(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("95% is in use"), NodeDiedError("gone")],  # type: ignore[no-untyped-call]
)
def test_an_actor_that_has_ended_is_not_alive_whatever_ended_it(error: Exception) -> None:
    assert asyncio.run(RayCluster().is_alive(EndedActor(error))) is False


async def test_a_file_of_a_node_that_is_lost_is_one_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = TaskUnschedulableError("the node\nis gone")
    monkeypatch.setattr(cluster, "_read_task", lambda: EndedActor(lost))
    with pytest.raises(OSError, match=r"^/saved could not be read on its node: .*is gone$"):
        await RayCluster().read(StoredFile("/saved", "ab" * 28, inode=0, modified_ns=0), 0, 10)
