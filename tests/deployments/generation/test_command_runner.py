"""How a replica runs the policy store's commands: what it reports, what breaks it, and which files it keeps."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import PolicyStoreLost
from deployments.generation.command_runner import CommandRunner
from deployments.policy.commands import (
    AbandonTransfer,
    AcceptRequests,
    ApplyTransfer,
    Canary,
    Command,
    CommandCosts,
    CommandReport,
    ComputeChecksum,
    FinishTransfer,
    InitTransfer,
    LoadedWeights,
    ReplicaNotRegistered,
    ReplicaRegistration,
    SaveTransfer,
    Stage,
    StartTransfer,
    StoredFile,
    StoredKind,
    Swap,
    SwapOptions,
    UpdateTransfer,
    VersionPayload,
)
from deployments.policy.node_files import NodeWeights
from tests.fakes.command_source import ScriptedCommands
from tests.virtual_time import run, synchronous

pytestmark = pytest.mark.slow

CHECKSUM_S = 10.0


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass
class ScriptedWeights:
    """Implements what `CommandRunner` calls of `WeightUpdater`; the method named `fails` raises."""

    fails: str = ""
    says: str | None = None
    """The message of that error."""
    engine_is_alive: bool = True
    needed_adapters: set[str] = field(default_factory=set)
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
    is_on_trial: bool = False
    canary_s: float = 0.0
    held_s: float = 0.0
    in_transfer: bool = False
    changes_nothing: bool = False
    calls: list[str] = field(default_factory=list)
    checksums_under_way: int = 0
    staged: dict[str, bytes] = field(default_factory=dict)
    """The files of the last stage, by name."""

    def call(self, name: str, argument: object = "") -> None:
        self.calls.append(f"{name} {argument}".strip())
        if name == self.fails:
            raise OSError(f"{name} failed" if self.says is None else self.says)

    async def stage(self, version: int, path: Path) -> None:
        self.staged = files_in(path.parent)
        self.call("stage", version)

    async def stage_adapter(self, version: int, folder: Path) -> None:
        self.staged = files_in(folder)
        self.call("stage_adapter", version)

    async def swap(self, options: SwapOptions, is_trial: bool) -> CommandCosts:
        self.call("swap", f"{options.mode} on trial" if is_trial else options.mode)
        self.is_on_trial, self.in_transfer = is_trial, False
        self.loaded = LoadedWeights(self.loaded.version + 1)
        return CommandCosts(swap_s=2.0, pause_s=3.0)

    def accept(self) -> None:
        self.call("accept")
        self.is_on_trial = False

    async def try_current(self) -> bool:
        self.call("try_current")
        await asyncio.sleep(self.canary_s)
        return self.changes_nothing

    async def init_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        self.call("init_transfer", f"{init_info['rank_offset']} within {timeout_s:g} s")

    async def start_transfer(self, options: SwapOptions, file: Path, header: bytes | None) -> None:
        self.in_transfer = True
        self.call("start_transfer", options.mode if header is None else f"{options.mode} to {file.name}")
        if header is not None:
            await asyncio.to_thread(file.write_bytes, header)

    async def saved_transfer(self) -> tuple[str, int]:
        self.call("saved_transfer")
        return "5f3a", 4

    async def update_transfer(self, update_info: Any, silence_s: float) -> None:
        self.call("update_transfer", f"{update_info} within {silence_s:g} s")

    async def abandon_transfer(self) -> None:
        self.call("abandon_transfer")

    async def apply_transfer(self) -> None:
        self.call("apply_transfer")

    async def finish_transfer(self, version: int) -> CommandCosts:
        self.call("finish_transfer", version)
        self.loaded, self.in_transfer = LoadedWeights(version), False
        return CommandCosts(swap_s=4.0, pause_s=4.0)

    async def checksum(self) -> str:
        self.checksums_under_way += 1
        try:
            await asyncio.sleep(CHECKSUM_S)
            return f"checksum of {self.loaded.version}"
        finally:
            self.checksums_under_way -= 1

    async def is_alive(self) -> bool:
        return self.engine_is_alive


async def nothing_is_fetched(*_: object) -> bytes:
    raise AssertionError("every file can be read here")


def runner_of(weights: ScriptedWeights, store: ScriptedCommands, folder: Path) -> CommandRunner:
    adapters = SimpleNamespace(needed=weights.needed_adapters, versions={"run-b": 7})
    engine: Any = SimpleNamespace(weights=weights, canary=weights, is_alive=weights.is_alive, adapters=adapters)
    node_weights = NodeWeights(folder, "node", nothing_is_fetched)
    node_weights.join()
    return CommandRunner(engine, store, lambda loaded: ReplicaRegistration("replica", None, 1, loaded), node_weights)


@synchronous
async def played(weights: ScriptedWeights, store: ScriptedCommands, folder: Path, for_s: float = 0.4) -> CommandRunner:
    """Runs the store's commands for so long; less than the replica waits before it registers again."""
    runner = runner_of(weights, store, folder)
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(for_s)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return runner


def stage(
    folder: Path, version: int, kind: StoredKind = "full", adapter_config: str | None = None, key: str | None = None
) -> Stage:
    """Of a version whose file, `b"weights"`, is on the replica's own node."""
    path = folder / "policy" / f"{version}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    file = StoredFile(str(path), "node", inode=1, modified_ns=1)
    return Stage(VersionPayload(version, kind, 7, "checksum", file, adapter_config=adapter_config, key=key))


def stage_adapter(folder: Path, version: int) -> Stage:
    return stage(folder, version, "adapter", '{"r": 8}')


def own_folder_with(folder: Path, *versions: int) -> Path:
    """The own folder of a replica that has staged `versions` before."""
    own = NodeWeights(folder, "node", nothing_is_fetched).own_folder
    for version in versions:
        (own / str(version)).mkdir(parents=True)
    return own


def test_staging_an_adapter_removes_those_that_are_no_longer_needed(tmp_path: Path) -> None:
    own = own_folder_with(tmp_path, 1, 2, 3, 4)
    played(ScriptedWeights(needed_adapters={"2", "4"}), ScriptedCommands(stage_adapter(tmp_path, 5)), tmp_path)
    assert {folder.name for folder in own.iterdir()} == {"2", "4", "5@checksum"}


@pytest.mark.parametrize("needed", [set(), {"5@checksum"}])
def test_an_adapter_can_be_staged_again(tmp_path: Path, needed: set[str]) -> None:
    store = ScriptedCommands(stage_adapter(tmp_path, 5), stage_adapter(tmp_path, 5))
    weights = ScriptedWeights(needed_adapters=needed)
    played(weights, store, tmp_path)
    assert store.errors == [(None, False)] * 2
    assert weights.staged == {"adapter_model.safetensors": b"weights", "adapter_config.json": b'{"r": 8}'}


def test_an_adapter_stays_readable_when_the_store_removes_its_file(tmp_path: Path) -> None:
    command = stage_adapter(tmp_path, 5)
    played(ScriptedWeights(), ScriptedCommands(command), tmp_path)
    Path(command.payload.file.path).unlink()
    own = own_folder_with(tmp_path) / "5@checksum"
    assert (own / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (own / "adapter_model.safetensors").stat().st_nlink == 1, "it was a link, not a copy"


def test_a_swap_reports_its_times_and_the_new_version(tmp_path: Path) -> None:
    store = ScriptedCommands(Swap(SwapOptions("wait")))
    weights = ScriptedWeights()
    played(weights, store, tmp_path)
    costs = CommandCosts(swap_s=2.0, pause_s=3.0)
    assert store.reports == [CommandReport(1, LoadedWeights(1), costs=costs)]
    assert weights.calls == ["swap wait"]


TRIAL = Swap(SwapOptions(), is_trial=True)


def test_a_trial_ends_when_requests_are_accepted(tmp_path: Path) -> None:
    weights, store = ScriptedWeights(changes_nothing=True), ScriptedCommands(TRIAL, Canary(9.0), AcceptRequests())
    assert played(weights, store, tmp_path).is_current.is_set()
    assert weights.calls == ["swap keep on trial", "try_current", "accept"]
    assert store.errors == [(None, False)] * 3
    assert [report.costs.canary_s > 0.0 for report in store.reports] == [False, False, True]
    assert [report.changes_nothing for report in store.reports] == [False, True, False]


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (ScriptedWeights(fails="try_current"), "OSError: try_current failed"),
        (ScriptedWeights(canary_s=60.0), "GenerationLost: The canary took longer than 0.1 s."),
    ],
)
def test_a_canary_that_fails_or_takes_too_long_leaves_the_replica_usable(
    tmp_path: Path, weights: ScriptedWeights, error: str
) -> None:
    store = ScriptedCommands(TRIAL, Canary(0.1), Swap(SwapOptions()))
    runner = played(weights, store, tmp_path)
    assert store.errors == [(None, False), (error, False), (None, False)]
    assert (runner.broken, weights.is_on_trial, runner.is_current.is_set()) == (None, False, False)


@pytest.mark.parametrize(
    ("before", "fails", "command"), [([], "stage_adapter", None), ([TRIAL], "try_current", Canary(9.0))]
)
def test_a_replica_whose_engine_dies_of_a_command_is_broken(
    tmp_path: Path, before: list[Command], fails: str, command: Command | None
) -> None:
    store = ScriptedCommands(*before, command or stage_adapter(tmp_path, 5))
    runner = played(ScriptedWeights(fails=fails, engine_is_alive=False), store, tmp_path)
    assert store.errors == [(None, False)] * len(before) + [(f"OSError: {fails} failed", True)]
    assert runner.broken == f"OSError: {fails} failed"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("stage failed\nTraceback (most recent call last):\n  File x", "stage failed"),
        (f"('a', {'b' * 999!r})", f"('a', '{'b' * 393}..."),
        ("", ""),
    ],
)
def test_a_failed_stage_changes_nothing_and_is_logged_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, shown: str
) -> None:
    caplog.set_level(logging.INFO)
    store = ScriptedCommands(stage(tmp_path, 5), AcceptRequests())
    runner = played(ScriptedWeights(fails="stage", says=text), store, tmp_path)
    assert store.errors == [(f"OSError: {text}", False), (None, False)]
    assert runner.broken is None
    warned, traced = caplog.records
    assert warned.getMessage() == f"The command Stage failed, and generation goes on: OSError: {shown}"
    assert (warned.levelname, warned.exc_info, traced.levelname) == ("WARNING", None, "INFO")
    assert traced.exc_info is not None


@pytest.mark.parametrize(
    ("fails", "command"),
    [("swap", Swap(SwapOptions())), ("abandon_transfer", AbandonTransfer()), ("finish_transfer", FinishTransfer(3))],
)
def test_a_failure_while_the_weights_change_breaks_the_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str, command: Command
) -> None:
    store = ScriptedCommands(command, AcceptRequests())
    runner = runner_of(ScriptedWeights(fails=fails), store, tmp_path)
    run(runner.run())
    assert runner.broken == f"OSError: {fails} failed"
    assert store.errors == [(f"OSError: {fails} failed", True)]
    assert not runner.is_current.is_set()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("rollout_service.generation", "ERROR")
    assert record.exc_info is not None


LOST = PolicyStoreLost("The policy store died during the call.")
SWAP = Swap(SwapOptions())
TRANSFER = (
    InitTransfer({"rank_offset": 1}, 30.0),
    StartTransfer(SwapOptions()),
    UpdateTransfer("names", 20.0),
    ApplyTransfer(),
)


@pytest.mark.parametrize("step", ["start_transfer", "update_transfer", "apply_transfer"])
def test_a_replica_whose_transfer_breaks_off_goes_back_to_full_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    steps = ("start_transfer", "update_transfer", "apply_transfer")
    transfer = TRANSFER[1 : 2 + steps.index(step)]
    back = (AbandonTransfer(), stage(tmp_path, 5), Swap(SwapOptions()))
    store = ScriptedCommands(*transfer, *back, end=LOST)
    runner = played(ScriptedWeights(fails=step), store, tmp_path, for_s=0.9)
    failed = (f"OSError: {step} failed", False)
    assert store.errors == [*[(None, False)] * (len(transfer) - 1), failed, *[(None, False)] * 3]
    name = type(transfer[-1]).__name__
    message = f"The command {name} failed, and the engine waits for full weights: OSError: {step} failed"
    assert caplog.messages[0] == message
    assert (runner.broken, store.registrations) == (None, [LoadedWeights(0), LoadedWeights(1)])


@pytest.mark.parametrize(
    ("commands", "loaded", "is_on_trial", "keys"),
    [
        ((SWAP,), 1, False, {1: "of 1"}),
        ((TRIAL,), 1, True, {1: "of 1"}),
        ((*TRANSFER, FinishTransfer(3, "of 3")), 3, False, {3: "of 3"}),
    ],
)
def test_a_replica_that_loses_the_store_registers_again_with_what_it_has(
    tmp_path: Path, commands: Sequence[Command], loaded: int, is_on_trial: bool, keys: dict[int, str]
) -> None:
    staged, never_loaded = (stage(tmp_path, version, key=f"of {version}") for version in (1, 2))
    store = ScriptedCommands(staged, *commands, never_loaded, end=LOST)
    runner = played(ScriptedWeights(), store, tmp_path, for_s=0.9)
    assert store.registrations == [LoadedWeights(0), LoadedWeights(loaded)]
    assert store.trials == [(False, {}), (is_on_trial, keys)]
    assert store.named == [{"run-b": 7}] * 2
    assert runner.broken is None


@pytest.mark.parametrize("end", [LOST, ReplicaNotRegistered("replica")])
def test_a_replica_that_loses_the_store_in_a_transfer_is_broken(tmp_path: Path, end: Exception) -> None:
    store, weights = ScriptedCommands(*TRANSFER, end=end), ScriptedWeights()
    runner = runner_of(weights, store, tmp_path)
    run(runner.run())
    begun = ["init_transfer 1 within 30 s", "start_transfer keep", "update_transfer names within 20 s"]
    assert weights.calls == [*begun, "apply_transfer"]
    assert store.errors == [(None, False)] * 4
    assert runner.broken == f"{type(end).__name__} in the middle of a weight transfer: {end}"
    assert store.registrations == [LoadedWeights(0)]


def test_where_the_weights_of_a_transfer_are_saved_is_reported(tmp_path: Path) -> None:
    start = StartTransfer(SwapOptions(), b"sent")
    store = ScriptedCommands(start, stage(tmp_path / "store", 2, "adapter", "{}"), FinishTransfer(3), SaveTransfer(3))
    weights = ScriptedWeights()
    played(weights, store, tmp_path / "node")
    assert store.errors == [(None, False)] * 4
    assert weights.calls[0] == "start_transfer keep to transfer.safetensors"
    *others, saved = [report.saved for report in store.reports]
    assert others == [None] * 3
    assert saved is not None
    assert (saved.version, saved.checksum, saved.size_bytes, saved.file.node_id) == (3, "5f3a", 4, "node")
    assert Path(saved.file.path).read_bytes() == b"sent"
    unsaved = ScriptedCommands(FinishTransfer(3), SaveTransfer(3))
    assert played(ScriptedWeights(fails="saved_transfer"), unsaved, tmp_path).broken is None
    assert unsaved.errors == [(None, False), ("OSError: saved_transfer failed", False)]


@pytest.mark.parametrize(
    ("commands", "checksums"),
    [
        ([SWAP, *TRANSFER, FinishTransfer(7)], []),
        ([ComputeChecksum()], [(LoadedWeights(0), "checksum of 0")]),
        ([SWAP, ComputeChecksum()], [(LoadedWeights(1), "checksum of 1")]),
        # The weights are replaced before their checksum is complete.
        ([ComputeChecksum(), SWAP], []),
        ([ComputeChecksum(), *TRANSFER], []),
        ([*TRANSFER, ComputeChecksum(), FinishTransfer(7)], []),
        ([*TRANSFER, FinishTransfer(7), ComputeChecksum()], [(LoadedWeights(7), "checksum of 7")]),
    ],
)
def test_a_checksum_is_computed_when_asked_for_and_is_of_weights_that_stay(
    tmp_path: Path, commands: list[Command], checksums: list[tuple[LoadedWeights, str]]
) -> None:
    store = ScriptedCommands(*commands)
    played(ScriptedWeights(), store, tmp_path, for_s=CHECKSUM_S + 1)
    assert store.checksums == checksums
    assert store.errors == [(None, False)] * len(commands)
