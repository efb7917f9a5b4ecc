"""`ServiceCheckpointManager`, called as verl's `RayPPOTrainer` does (its source at commit 1dda039)."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    """verl's worker group of actors, as FSDP saves a model: `saves_model` says whether `hf_model` is in the config.

    It keeps checkpoints as verl does: every save enters the list, and a limit removes the folders of the oldest. Where
    the limit is 1 the earlier one goes when the next one is complete, otherwise before that.
    """

    def __init__(self, saves_model: bool = True) -> None:
        self.saves_model = saves_model
        self.weight = 0.0
        self.saved: list[str] = []
        self.seen_while_saving: list[list[str]] = []

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        assert hdfs_path is None
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 1:
            self._keep(max_ckpt_to_keep - 1)
        self.seen_while_saving.append(checkpoints(Path(local_path).parent))
        folder = Path(local_path) / "huggingface"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        if self.saves_model:
            save_file({"weight": torch.tensor([self.weight, float(global_step)])}, folder / "model.safetensors")
        self.saved.append(local_path)
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            self._keep(max_ckpt_to_keep)

    def _keep(self, count: int) -> None:
        for old in self.saved[:-count]:
            shutil.rmtree(old, ignore_errors=True)
        self.saved = self.saved[-count:]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


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


def trained(folder: Path, steps: Sequence[str], max_ckpt_to_keep: int | None, pushes: bool) -> list[list[str]]:
    """The trainer's checkpoints during each of its saves, and in the end.

    Args:
        steps: of the trainer, in order: an update of the weights, or a checkpoint.
        pushes: whether `ServiceCheckpointManager` makes the updates, or nobody does.
    """
    actors = Actors()
    manager, _ = made(folder / "weights", actors)
    seen = []
    for number, step in enumerate(steps):
        if step == "checkpoint":
            path = folder / f"global_step_{number:02}"
            actors.save_checkpoint(str(path), None, number, max_ckpt_to_keep=max_ckpt_to_keep)
            seen.append(actors.seen_while_saving[-1])
        elif pushes:
            manager.update_weights(number)
    return [*seen, checkpoints(folder)]


@pytest.mark.parametrize(
    ("max_ckpt_to_keep", "kept"),
    [
        (1, ["global_step_24"]),
        (3, ["global_step_14", "global_step_19", "global_step_24"]),
        (None, [f"global_step_{number:02}" for number in (4, 9, 14, 19, 24)]),
    ],
)
def test_pushes_between_checkpoints_remove_none_of_those_that_verl_is_to_keep(
    tmp_path: Path, max_ckpt_to_keep: int | None, kept: list[str]
) -> None:
    steps = ["push", "push", "push", "push", "checkpoint"] * 5
    assert trained(tmp_path, steps, max_ckpt_to_keep, pushes=True)[-1] == kept


@given(
    steps=st.lists(st.sampled_from(["push", "checkpoint"]), max_size=20),
    max_ckpt_to_keep=st.sampled_from([None, 0, 1, 2, 3]),
)
def test_at_each_moment_the_trainer_has_the_checkpoints_that_it_has_without_pushes(
    steps: list[str], max_ckpt_to_keep: int | None
) -> None:
    with tempfile.TemporaryDirectory() as with_pushes, tempfile.TemporaryDirectory() as without:
        assert trained(Path(with_pushes), steps, max_ckpt_to_keep, pushes=True) == trained(
            Path(without), steps, max_ckpt_to_keep, pushes=False
        )


def test_what_else_lies_in_the_folder_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.txt").write_text("mine")
    trained(tmp_path, ["push", "checkpoint"] * 4, 1, pushes=True)
    assert (tmp_path / "weights" / "mine.txt").read_text() == "mine"


def test_a_folder_is_needed_and_nothing_else_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        ServiceCheckpointManager(SimpleNamespace(engine_kwargs={}), Actors(), [])
    with pytest.raises(ValueError, match="path"):
        made(tmp_path, Actors(), path="there")
