"""`ServiceCheckpointManager`, called as verl's `RayPPOTrainer` does (its source at commit 1dda039)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_client.trainers import verl_weights
from rollout_client.trainers.verl_weights import ServiceCheckpointManager


class Replica:
    """Of verl's own engines."""

    def __init__(self) -> None:
        self.slept = 0

    async def sleep(self) -> None:
        self.slept += 1


class Actors:
    """verl's worker group of actors, as FSDP saves a model: `saves_model` says whether `hf_model` is in the config."""

    def __init__(self, saves_model: bool = True) -> None:
        self.saves_model = saves_model
        self.weight = 0.0

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        assert (hdfs_path, max_ckpt_to_keep) == (None, None)
        folder = Path(local_path) / "huggingface"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        if self.saves_model:
            save_file({"weight": torch.tensor([self.weight, float(global_step)])}, folder / "model.safetensors")


class Client:
    def __init__(self, url: str | None) -> None:
        self.url = url
        self.pushed: list[list[float]] = []

    def push_weights(self, source: Path) -> None:
        self.pushed.append(load_file(source / "model.safetensors")["weight"].tolist())


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_weights, "RolloutClient", Client)


def made(folder: Path, actors: Any, *replicas: Replica, **settings: Any) -> tuple[ServiceCheckpointManager, Any]:
    service = {"folder": str(folder), "url": "http://service"} | settings
    config = SimpleNamespace(backend="naive", engine_kwargs={"rollout_service": service})
    manager = ServiceCheckpointManager(config=config, actor_wg=actors, replicas=list(replicas))
    return manager, manager.client


def test_each_update_is_a_push_of_the_weights_of_its_step(tmp_path: Path) -> None:
    actors = Actors()
    manager, client = made(tmp_path, actors, Replica())
    manager.sleep_replicas()
    manager.update_weights(0)
    actors.weight = 0.5
    manager.sleep_replicas()
    manager.update_weights(1)
    assert client.url == "http://service"
    assert client.pushed == [[0, 0], [0.5, 1]]


def test_verls_own_engines_sleep_once_and_for_all(tmp_path: Path) -> None:
    replicas = [Replica(), Replica()]
    manager, _ = made(tmp_path, Actors(), *replicas)
    for step in range(3):
        manager.sleep_replicas()
        manager.update_weights(step)
    assert [replica.slept for replica in replicas] == [1, 1]


def test_weights_of_an_earlier_step_are_not_pushed_again(tmp_path: Path) -> None:
    actors = Actors()
    manager, client = made(tmp_path, actors)
    manager.update_weights(0)
    actors.saves_model = False
    with pytest.raises(FileNotFoundError, match="hf_model"):
        manager.update_weights(1)
    assert client.pushed == [[0, 0]]


def test_a_folder_is_needed_and_nothing_else_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        ServiceCheckpointManager(SimpleNamespace(engine_kwargs={}), Actors(), [])
    with pytest.raises(ValueError, match="path"):
        made(tmp_path, Actors(), path="there")
