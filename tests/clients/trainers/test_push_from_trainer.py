"""A push from a trainer of several processes: the main process pushes, every process learns how it ended."""

from typing import Any

import pytest

from rollout_client import PolicyPusher
from rollout_client.errors import ServiceUnreachable
from rollout_client.trainers import trl as module
from rollout_client.trainers.trl import WeightsNotPushed, push_from_trainer
from tests.clients.trainers.scripted_trainer import PushingClient, trainer


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process has broadcast; it receives the same."""
    said: list[Any] = []

    def broadcast(objects: list[Any], **_: Any) -> list[Any]:
        said.append(objects)
        return objects

    monkeypatch.setattr(module, "broadcast_object_list", broadcast)
    return said


@pytest.mark.parametrize(
    "failure",
    [
        ServiceUnreachable("Nobody is there."),
        ValueError("They do not fit."),
        RuntimeError("out of memory"),
        KeyboardInterrupt("stopped"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_other_processes_get_the_version_or_why_there_is_none(
    client: PushingClient, said: list[Any], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
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


@pytest.mark.parametrize("is_main", [True, False])
def test_a_process_that_fails_early_still_broadcasts(client: PushingClient, said: list[Any], is_main: bool) -> None:
    def interrupted(_model: Any) -> Any:
        raise KeyboardInterrupt

    training = trainer()
    training.accelerator.is_main_process = is_main
    training.accelerator.unwrap_model = interrupted
    with pytest.raises(KeyboardInterrupt):
        push_from_trainer(PolicyPusher(client), training)
    assert said == [["KeyboardInterrupt"]]
    assert client.pushed == []
