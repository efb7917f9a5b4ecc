"""The model and the run that a store's folder belongs to: which folders are taken, and which are refused."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from deployments.policy.versions.run_identity import FolderRefused, RunIdentity, recorded_in
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from tests.deployments.policy.policy_world import World, in_world, weights
from tests.deployments.policy.weight_files import GOOD, written


def model(folder: Path, **others: torch.Tensor) -> str:
    written(folder / "model.safetensors", {**GOOD, **others})
    return str(folder)


def add_version(store: VersionStore, version: int = 1) -> None:
    info = StoredVersion(version=version, kind="transfer", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    store.add(info, None)
    store.make_current(version)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "policy")


def refusal(identity: RunIdentity, store: VersionStore) -> str:
    with pytest.raises(FolderRefused) as refused:
        identity.claim(store)
    assert str(refused.value) == f"policy.folder: {store.folder} {identity.problem_of(store.folder)}"
    return str(identity.problem_of(store.folder))


def test_a_folder_records_the_run_and_the_model_at_the_first_start(store: VersionStore, tmp_path: Path) -> None:
    name = model(tmp_path / "model")
    assert RunIdentity("run-a", name, "main").claim(store) == "run-a"
    record = recorded_in(store.folder)
    assert record is not None
    assert (record.run, record.model, record.revision) == ("run-a", name, "main")
    assert record.layout is not None


def test_a_run_without_a_name_is_named_alike_after_its_folder_was_lost_and_otherwise_in_another_folder(
    store: VersionStore, tmp_path: Path
) -> None:
    identity = RunIdentity(None, "org/model")
    name = identity.claim(store)
    (store.folder / "run.json").unlink()
    assert identity.claim(store) == name
    assert identity.claim(VersionStore(tmp_path / "other")) != name


def test_a_service_without_a_named_run_goes_on_with_the_folders(store: VersionStore) -> None:
    RunIdentity("run-a", "org/model").claim(store)
    add_version(store)
    assert RunIdentity(None, "org/model").claim(store) == "run-a"


def test_versions_of_another_run_are_refused(store: VersionStore) -> None:
    RunIdentity("run-a", "org/model").claim(store)
    add_version(store)
    assert refusal(RunIdentity("run-b", "org/model"), store) == (
        "holds the versions of the run run-a, and policy.run is run-b: name another folder, or set policy.run to run-a "
        "to go on with its weights."
    )


def test_versions_of_another_model_are_refused_unless_the_config_names_their_run(store: VersionStore) -> None:
    RunIdentity("run-a", "org/model", "v1").claim(store)
    add_version(store)
    assert refusal(RunIdentity(None, "org/model", "v2"), store) == (
        "holds versions of the model org/model at v1, and the service's model is org/model at v2: name another folder, "
        "or set policy.run to run-a to go on with its weights if it is the same model in another place."
    )
    assert RunIdentity("run-a", "org/model", "v2").claim(store) == "run-a"


def test_versions_of_a_model_with_other_tensors_are_refused_even_if_the_config_names_their_run(
    store: VersionStore, tmp_path: Path
) -> None:
    first, second = model(tmp_path / "first"), model(tmp_path / "second", more=torch.ones(1))
    RunIdentity("run-a", first).claim(store)
    add_version(store)
    assert refusal(RunIdentity("run-a", second), store) == (
        f"holds versions of a model with other tensors, {first}, and the service's model is {second}: name another "
        "folder."
    )


def test_a_folder_without_versions_is_taken_over_and_loses_the_initial_weights_of_the_other_model(
    store: VersionStore,
) -> None:
    RunIdentity("run-a", "org/model").claim(store)
    written(store.weights(0), GOOD)
    assert RunIdentity("run-b", "org/other").problem_of(store.folder) is None
    assert RunIdentity("run-b", "org/other").claim(store) == "run-b"
    assert not store.weights(0).exists()


def test_a_folder_with_versions_that_records_nothing_is_taken_over(store: VersionStore) -> None:
    add_version(store)
    assert RunIdentity("run-a", "org/model").claim(store) == "run-a"
    assert store.current() == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(FolderRefused, match=r"^policy\.folder: .*/file/policy cannot be written: .*File exists"):
        RunIdentity(None, "org/model").claim(VersionStore(tmp_path / "file" / "policy"))


@in_world(run="run-a")
async def test_each_version_records_its_run(world: World) -> None:
    await world.push(1, weights(2.0))
    assert world.version_store.info(1).run == "run-a"
    with pytest.raises(FolderRefused):
        World(world.folder, run="run-b")
