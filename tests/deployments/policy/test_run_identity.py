"""The model and the run that a store's folder belongs to: which folders are taken, and which are refused."""

import json
from pathlib import Path

import pytest

from deployments.policy.durable_files import write_durably
from deployments.policy.run_identity import FolderRefused, RunIdentity
from deployments.policy.versions import INDEX, _VersionIndex, initial_file, read_index
from tests.deployments.policy.policy_world import World, in_world, weights
from tests.deployments.policy.weight_files import GOOD, written


def add_version(folder: Path) -> None:
    write_durably(folder / INDEX, _VersionIndex(current=1).model_dump_json())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "policy"


def run_of(folder: Path) -> str:
    """The run that the folder records."""
    return str(json.loads((folder / "run.json").read_text())["run"])


def refusal(identity: RunIdentity, folder: Path) -> str:
    with pytest.raises(FolderRefused) as refused:
        identity.claim(folder)
    named = f"policy.folder: {folder} "
    assert str(refused.value).startswith(named)
    return str(refused.value).removeprefix(named)


def test_a_folder_records_the_run_and_the_model_and_goes_on_with_them(folder: Path) -> None:
    RunIdentity("run-a", "org/model", "main").claim(folder)
    record = json.loads((folder / "run.json").read_text())
    assert (record["run"], record["model"], record["revision"]) == ("run-a", "org/model", "main")
    add_version(folder)
    RunIdentity(None, "org/model", "main").claim(folder)
    assert run_of(folder) == "run-a"


def test_a_run_without_a_name_gets_one_which_the_folder_keeps(folder: Path) -> None:
    RunIdentity(None, "org/model").claim(folder)
    name = run_of(folder)
    RunIdentity(None, "org/model").claim(folder)
    assert (run_of(folder), name[:4]) == (name, "run-")


def test_versions_of_another_run_are_refused(folder: Path) -> None:
    RunIdentity("run-a", "org/model").claim(folder)
    add_version(folder)
    assert refusal(RunIdentity("run-b", "org/model"), folder) == (
        "holds the versions of the run run-a, and policy.run is run-b: name another folder, or set policy.run to run-a "
        "to go on with its weights."
    )


def test_versions_of_another_model_are_refused_unless_the_run_is_named(folder: Path) -> None:
    RunIdentity("run-a", "org/model", "v1").claim(folder)
    add_version(folder)
    assert refusal(RunIdentity(None, "org/model", "v2"), folder) == (
        "holds versions of the model org/model at v1, and the service's model is org/model at v2: name another folder, "
        "or set policy.run to run-a to go on with its weights if it is the same model in another place."
    )
    RunIdentity("run-a", "org/model", "v2").claim(folder)
    assert run_of(folder) == "run-a"


def test_a_folder_without_versions_is_taken_over_without_initial_weights(
    folder: Path,
) -> None:
    RunIdentity("run-a", "org/model").claim(folder)
    written(initial_file(folder), GOOD)
    RunIdentity("run-b", "org/other").claim(folder)
    assert run_of(folder) == "run-b"
    assert not initial_file(folder).exists()


def test_a_folder_with_versions_that_records_nothing_is_taken_over(folder: Path) -> None:
    add_version(folder)
    RunIdentity("run-a", "org/model").claim(folder)
    assert run_of(folder) == "run-a"
    assert read_index(folder).current == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(FolderRefused, match=r"^policy\.folder: .*/file/policy cannot be written: .*File exists"):
        RunIdentity(None, "org/model").claim(tmp_path / "file" / "policy")


@in_world(run="run-a")
async def test_a_folder_with_versions_of_another_run_is_refused_at_the_start(world: World) -> None:
    await world.push(1, weights(2.0))
    with pytest.raises(FolderRefused):
        World(world.folder, run="run-b")
