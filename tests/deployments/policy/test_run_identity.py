"""The model and the run that a store's folder belongs to: which folders are taken, and which are refused."""

import json
from pathlib import Path

import pytest

from deployments.policy.durable_files import write_durably
from deployments.policy.run_identity import FolderRefused, RunIdentity
from deployments.policy.versions import INDEX, _VersionIndex, initial_file, read_index
from tests.deployments.policy.policy_world import World, adapter, in_world, weights
from tests.deployments.policy.weight_files import GOOD, written
from tests.patterns import whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "policy"


def run_of(folder: Path) -> str:
    """The run that the folder records."""
    return str(json.loads((folder / "run.json").read_text())["run"])


A_V1 = RunIdentity("run-a", "org/model", "v1")
OTHER_RUN = (
    "holds the versions of the run run-a, and policy.run is run-b: name another folder, or set policy.run to run-a "
    "to go on with its weights."
)
OTHER_MODEL = (
    "holds versions of the model org/model at v1, and the service's model is org/model at v2: name another folder, "
    "or set policy.run to run-a to go on with its weights if it is the same model in another place."
)


@pytest.mark.parametrize(
    ("first", "next_", "run", "refusal"),
    [
        (A_V1, RunIdentity(None, "org/model", "v1"), "run-a", None),
        (A_V1, RunIdentity("run-a", "org/model", "v2"), "run-a", None),
        (None, RunIdentity("run-b", "org/model"), "run-b", None),
        (A_V1, RunIdentity("run-b", "org/model", "v1"), "run-a", OTHER_RUN),
        (A_V1, RunIdentity(None, "org/model", "v2"), "run-a", OTHER_MODEL),
    ],
)
def test_a_folder_with_versions_goes_on_with_its_run_and_its_model_alone(
    folder: Path, first: RunIdentity | None, next_: RunIdentity, run: str, refusal: str | None
) -> None:
    if first is not None:
        first.claim(folder)
    write_durably(folder / INDEX, _VersionIndex(current=1).model_dump_json())
    if refusal is None:
        next_.claim(folder)
    else:
        with pytest.raises(FolderRefused, match=whole(f"policy.folder: {folder} {refusal}")):
            next_.claim(folder)
    assert (run_of(folder), read_index(folder).current) == (run, 1)


def test_a_run_without_a_name_gets_one_which_the_folder_keeps(folder: Path) -> None:
    records = []
    for _ in range(2):
        RunIdentity(None, "org/model", "main").claim(folder)
        records.append(json.loads((folder / "run.json").read_text()))
    assert records[0] == records[1]
    assert (records[0]["run"][:4], records[0]["model"], records[0]["revision"]) == ("run-", "org/model", "main")


def test_a_folder_without_versions_is_taken_over_without_initial_weights(folder: Path) -> None:
    RunIdentity("run-a", "org/model").claim(folder)
    written(initial_file(folder), GOOD)
    RunIdentity("run-b", "org/other").claim(folder)
    assert run_of(folder) == "run-b"
    assert not initial_file(folder).exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(FolderRefused, match=r"^policy\.folder: .*/file/policy cannot be written: .*File exists"):
        RunIdentity(None, "org/model").claim(tmp_path / "file" / "policy")


@pytest.mark.parametrize("kind", ["full", "adapter"])
@in_world(run="run-a")
async def test_a_folder_with_versions_of_another_run_is_refused_at_the_start(world: World, kind: str) -> None:
    await world.push(1, weights(2.0) if kind == "full" else adapter(), kind=kind, name=None if kind == "full" else "a")
    world.settings["run"] = "run-b"
    with pytest.raises(FolderRefused, match="holds the versions of the run run-a"):
        world.another_store()
