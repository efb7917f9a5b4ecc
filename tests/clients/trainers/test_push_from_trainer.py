"""A push from a trainer of several processes: the main process pushes, every process learns how it ended."""

from typing import Any

import pytest

from rollout_client import PolicyPusher
from rollout_client.errors import ServiceUnreachable
from rollout_client.trainers import trl as module
from rollout_client.trainers.trl import WeightsNotPushed, push_from_trainer
from tests.clients.trainers.scripted_trainer import PushingClient, trainer


@pytest.mark.parametrize("failure", [ServiceUnreachable("Nobody is there."), ValueError("They do not fit.")])
def test_other_processes_get_the_version_of_the_main_one_or_why_there_is_none(
    client: PushingClient, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    said: list[Any] = []

    def broadcast(objects: list[Any], **_: Any) -> list[Any]:
        said.append(objects)
        return objects

    monkeypatch.setattr(module, "broadcast_object_list", broadcast)
    pusher, training, other = PolicyPusher(client), trainer(), trainer()
    other.accelerator.is_main_process = False
    assert push_from_trainer(pusher, training) == 101
    client.failure = failure
    with pytest.raises(type(failure)):
        push_from_trainer(pusher, training)
    assert said == [[101], [str(failure)]]
    monkeypatch.setattr(module, "broadcast_object_list", lambda _objects, **_: said.pop())
    with pytest.raises(WeightsNotPushed, match=f"could not push the weights: {failure}"):
        push_from_trainer(pusher, other)
    assert push_from_trainer(pusher, other) == 101
    assert len(client.pushed) == 1
