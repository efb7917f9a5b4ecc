"""Warnings of a cluster of several nodes about the folder of the policy store."""

import asyncio
import logging
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, TaskUnschedulableError

from deployments.policy import cluster
from deployments.policy.cluster import RayCluster
from deployments.policy.commands import StoredFile
from tests.deployments.policy.policy_world import World, play
from tests.virtual_time import settled


def test_nodes_that_do_not_share_the_folder_are_named_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        world.cluster.lacking = ["node-2", "node-3"]
        await settled()

    play(story, tmp_path)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("rollout_service.policy", logging.WARNING)
    assert record.getMessage() == (
        f"Not all nodes share the folder of the policy store, {tmp_path / 'policy'}; these do not see it: node-2, "
        "node-3. If the store's node is lost, so are all versions and the unfinished uploads, and the service goes on "
        "with the model that it was started with. Set policy.folder to a folder that all nodes share."
    )


def test_a_folder_that_all_nodes_see_is_no_matter_for_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(_world: World) -> None:
        await settled()

    play(story, tmp_path)
    assert caplog.records == []


class EndedActor:
    """An actor, or a task, whose calls raise what Ray raises once it has ended."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.__ray_ready__ = self

    async def remote(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("95% is in use"), NodeDiedError("gone")],  # type: ignore[no-untyped-call]
)
def test_an_actor_that_has_ended_is_not_alive_whatever_ended_it(error: Exception) -> None:
    assert asyncio.run(RayCluster().is_alive(EndedActor(error))) is False


def test_a_file_of_a_node_that_is_lost_is_one_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = TaskUnschedulableError("the node\nis gone")
    monkeypatch.setattr(cluster, "_on_node", lambda _node_id, _function: EndedActor(lost))

    async def read() -> bytes:
        return await RayCluster().read(StoredFile("/saved", "node-2", inode=0, modified_ns=0), 0, 10)

    with pytest.raises(OSError, match=r"^/saved could not be read on its node: .*is gone$"):
        asyncio.run(read())
