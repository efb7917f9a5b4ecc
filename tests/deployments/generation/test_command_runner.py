"""How a replica runs the policy store's commands: what it reports, what breaks it, and which files it keeps."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import PolicyStoreLost
from deployments.generation.command_runner import CommandRunner
from deployments.logs import _JsonLinesFormatter
from deployments.policy.commands import (
    AbandonTransfer,
    AcceptRequests,
    ApplyTransfer,
    Canary,
    Command,
    CommandCosts,
    CommandReport,
    CommandSource,
    ComputeChecksum,
    FinishTransfer,
    InitTransfer,
    LoadedWeights,
    NumberedCommand,
    ReplicaNotRegistered,
    ReplicaRegistration,
    SaveTransfer,
    SetAdapters,
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
from service.startup.console_logs import _text_for_the_console
from tests.virtual_time import run, settled

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


class ScriptedStore(CommandSource):
    """Gives its commands one after the other, then raises `end`, or gives none any more."""

    def __init__(self, *commands: Command, end: Exception | None = None) -> None:
        self.commands = [NumberedCommand(number, command) for number, command in enumerate(commands, 1)]
        self.end = end
        self.registrations: list[LoadedWeights] = []
        self.trials: list[tuple[bool, dict[int, str]]] = []
        self.named: list[Mapping[str, int]] = []
        self.keys: list[Mapping[int, str]] = []
        """With each registration."""
        self.reports: list[CommandReport] = []
        self.checksums: list[tuple[LoadedWeights, str]] = []

    async def register(self, registration: ReplicaRegistration) -> None:
        self.registrations.append(registration.loaded)
        self.trials.append((registration.is_on_trial, dict(registration.keys)))
        self.named.append(registration.named)
        self.keys.append(registration.keys)

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        assert replica_id == "replica"
        if report is not None:
            self.reports.append(report)
        if self.commands:
            return self.commands.pop(0)
        if self.end is not None:
            raise self.end
        await asyncio.Event().wait()
        return None

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.checksums.append((loaded, checksum))


async def nothing_is_fetched(*_: object) -> bytes:
    raise AssertionError("every file can be read here")


def runner_of(weights: ScriptedWeights, store: ScriptedStore, folder: Path) -> CommandRunner:
    adapters = SimpleNamespace(needed=weights.needed_adapters, versions={"run-b": 7})
    engine: Any = SimpleNamespace(weights=weights, canary=weights, is_alive=weights.is_alive, adapters=adapters)
    node_weights = NodeWeights(folder, "node", nothing_is_fetched)
    node_weights.join()
    return CommandRunner(engine, store, lambda loaded: ReplicaRegistration("replica", None, 1, loaded), node_weights)


def played(weights: ScriptedWeights, store: ScriptedStore, folder: Path, seconds: float = 0.4) -> CommandRunner:
    """Runs the store's commands for so long; less than the replica waits before it registers again."""

    async def play() -> CommandRunner:
        runner = runner_of(weights, store, folder)
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return runner

    return run(play())


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


def errors(reports: Sequence[CommandReport]) -> list[tuple[str | None, bool]]:
    return [(report.error, report.broken) for report in reports]


def test_full_weights_are_staged_from_the_file_of_the_node_without_a_copy(tmp_path: Path) -> None:
    weights, store = ScriptedWeights(), ScriptedStore(stage(tmp_path, 5))
    played(weights, store, tmp_path / "node")
    assert weights.staged == {"5.safetensors": b"weights"}
    assert weights.calls == ["stage 5"]
    [report] = store.reports
    assert (report.costs.fetched_bytes, report.costs.read_bytes) == (0, 7)
    assert not [path for path in (tmp_path / "node").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_an_adapter_is_staged_with_its_config(tmp_path: Path) -> None:
    weights, store = ScriptedWeights(), ScriptedStore(stage_adapter(tmp_path, 5))
    played(weights, store, tmp_path / "node")
    assert weights.staged == {"adapter_model.safetensors": b"weights", "adapter_config.json": b'{"r": 8}'}
    assert weights.calls == ["stage_adapter 5"]


def own_folder_with(folder: Path, *versions: int) -> Path:
    """The own folder of a replica that has staged `versions` before."""
    own = NodeWeights(folder, "node", nothing_is_fetched).own_folder
    for version in versions:
        (own / str(version)).mkdir(parents=True)
    return own


def test_staging_an_adapter_removes_those_that_are_no_longer_needed(tmp_path: Path) -> None:
    own = own_folder_with(tmp_path, 1, 2, 3, 4)
    played(ScriptedWeights(needed_adapters={"2", "4"}), ScriptedStore(stage_adapter(tmp_path, 5)), tmp_path)
    assert {folder.name for folder in own.iterdir()} == {"2", "4", "5@checksum"}


@pytest.mark.parametrize("needed", [set(), {"5@checksum"}])
def test_an_adapter_can_be_staged_again(tmp_path: Path, needed: set[str]) -> None:
    store = ScriptedStore(stage_adapter(tmp_path, 5), stage_adapter(tmp_path, 5))
    weights = ScriptedWeights(needed_adapters=needed)
    played(weights, store, tmp_path)
    assert errors(store.reports) == [(None, False)] * 2
    assert weights.staged == {"adapter_model.safetensors": b"weights", "adapter_config.json": b'{"r": 8}'}


def test_an_adapter_stays_readable_when_the_store_removes_its_file(tmp_path: Path) -> None:
    command = stage_adapter(tmp_path, 5)
    played(ScriptedWeights(), ScriptedStore(command), tmp_path)
    Path(command.payload.file.path).unlink()
    own = own_folder_with(tmp_path) / "5@checksum"
    assert (own / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (own / "adapter_model.safetensors").stat().st_nlink == 1, "it was a link, not a copy"


def test_adapters_that_cannot_be_set_leave_the_replica_whole(tmp_path: Path) -> None:
    store = ScriptedStore(SetAdapters((replace(stage_adapter(tmp_path, 5).payload, name="run-b", base=4),), 60.0))
    played(ScriptedWeights(), store, tmp_path)
    [report] = store.reports
    refused = "BaseReplaced: It is an adapter for version 4, and the replica has version 0."
    assert (report.error, report.broken, report.costs.fetched_bytes) == (refused, False, 0)
    assert store.named == [{"run-b": 7}]


def test_a_swap_reports_its_times_and_the_new_version(tmp_path: Path) -> None:
    store = ScriptedStore(Swap(SwapOptions("wait")))
    weights = ScriptedWeights()
    played(weights, store, tmp_path)
    costs = CommandCosts(swap_s=2.0, pause_s=3.0)
    assert store.reports == [CommandReport(1, LoadedWeights(1), costs=costs)]
    assert weights.calls == ["swap wait"]


TRIAL = Swap(SwapOptions(), is_trial=True)


def test_a_trial_ends_when_requests_are_accepted(tmp_path: Path) -> None:
    weights, store = ScriptedWeights(), ScriptedStore(TRIAL, Canary(9.0), AcceptRequests())
    played(weights, store, tmp_path)
    assert weights.calls == ["swap keep on trial", "try_current", "accept"]
    assert errors(store.reports) == [(None, False)] * 3
    assert [report.costs.canary_s > 0.0 for report in store.reports] == [False, False, True]


def test_that_the_canary_has_seen_no_change_is_reported_once(tmp_path: Path) -> None:
    store = ScriptedStore(TRIAL, Canary(9.0), AcceptRequests())
    played(ScriptedWeights(changes_nothing=True), store, tmp_path)
    assert [report.changes_nothing for report in store.reports] == [False, True, False]


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (ScriptedWeights(fails="try_current"), "OSError: try_current failed"),
        (ScriptedWeights(canary_s=60.0), "GenerationLost: The canary took longer than 0.1 s."),
    ],
)
def test_a_canary_that_fails_or_takes_too_long_leaves_the_replica_usable_for_other_weights(
    tmp_path: Path, weights: ScriptedWeights, error: str
) -> None:
    store = ScriptedStore(TRIAL, Canary(0.1), Swap(SwapOptions()))
    runner = played(weights, store, tmp_path)
    assert errors(store.reports) == [(None, False), (error, False), (None, False)]
    assert (runner.broken, weights.is_on_trial) == (None, False)


def test_a_replica_whose_engine_dies_of_the_canary_is_broken(tmp_path: Path) -> None:
    store = ScriptedStore(TRIAL, Canary(9.0))
    runner = played(ScriptedWeights(fails="try_current", engine_is_alive=False), store, tmp_path)
    assert errors(store.reports) == [(None, False), ("OSError: try_current failed", True)]
    assert runner.broken == "OSError: try_current failed"


def test_a_replica_that_loses_the_store_during_a_trial_says_so(tmp_path: Path) -> None:
    store = ScriptedStore(TRIAL, end=PolicyStoreLost("The policy store died during the call."))
    played(ScriptedWeights(), store, tmp_path, seconds=0.9)
    assert store.trials == [(False, {}), (True, {})]


def test_a_replica_is_current_only_when_the_store_says_so(tmp_path: Path) -> None:
    before = played(ScriptedWeights(), ScriptedStore(Swap(SwapOptions())), tmp_path)
    after = played(ScriptedWeights(), ScriptedStore(Swap(SwapOptions()), AcceptRequests()), tmp_path)
    assert (before.is_current.is_set(), after.is_current.is_set()) == (False, True)


def test_weights_that_cannot_be_staged_leave_the_replica_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ScriptedStore(stage(tmp_path, 5), AcceptRequests())
    runner = played(ScriptedWeights(fails="stage"), store, tmp_path)
    assert errors(store.reports) == [("OSError: stage failed", False), (None, False)]
    assert runner.broken is None
    message = "The command Stage failed, and generation goes on: OSError: stage failed"
    assert caplog.messages == [message]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("stage failed\nTraceback (most recent call last):\n  File x", "stage failed"),
        (f"('a', {'b' * 999!r})", f"('a', '{'b' * 393}..."),
        ("", ""),
    ],
)
def test_a_command_that_fails_is_one_line_on_the_console_and_a_traceback_in_the_replicas_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, shown: str
) -> None:
    caplog.set_level(logging.INFO)
    played(ScriptedWeights(fails="stage", says=text), ScriptedStore(stage(tmp_path, 5)), tmp_path)
    lines = [json.loads(_JsonLinesFormatter("Generator", "r0").format(record)) for record in caplog.records]
    assert [_text_for_the_console(line) for line in lines] == [
        f"[Generator] warning: The command Stage failed, and generation goes on: OSError: {shown}",
        None,
    ]
    assert "exception" not in lines[0]
    assert lines[1]["exception"].endswith(f"OSError: {text}".strip().removesuffix(":"))


def test_a_replica_whose_engine_died_while_it_staged_is_broken(tmp_path: Path) -> None:
    store = ScriptedStore(stage_adapter(tmp_path, 5))
    runner = played(ScriptedWeights(fails="stage_adapter", engine_is_alive=False), store, tmp_path)
    assert errors(store.reports) == [("OSError: stage_adapter failed", True)]
    assert runner.broken == "OSError: stage_adapter failed"


@pytest.mark.parametrize(
    ("fails", "command"),
    [
        ("swap", Swap(SwapOptions())),
        ("abandon_transfer", AbandonTransfer()),
        ("finish_transfer", FinishTransfer(3)),
    ],
)
def test_a_command_that_fails_while_it_changes_the_weights_breaks_the_replica_after_its_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str, command: Command
) -> None:
    store = ScriptedStore(command, AcceptRequests())
    runner = runner_of(ScriptedWeights(fails=fails), store, tmp_path)
    run(runner.run())
    assert runner.broken == f"OSError: {fails} failed"
    assert errors(store.reports) == [(f"OSError: {fails} failed", True)]
    assert not runner.is_current.is_set()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("rollout_service.generation", "ERROR")
    assert record.exc_info is not None


@pytest.mark.parametrize("step", ["start_transfer", "update_transfer", "apply_transfer"])
def test_a_replica_whose_transfer_breaks_off_goes_back_and_registers_again_with_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    steps = ("start_transfer", "update_transfer", "apply_transfer")
    transfer = TRANSFER[1 : 2 + steps.index(step)]
    back = (AbandonTransfer(), stage(tmp_path, 5), Swap(SwapOptions()))
    store = ScriptedStore(*transfer, *back, end=PolicyStoreLost("The policy store died during the call."))
    runner = played(ScriptedWeights(fails=step), store, tmp_path, seconds=0.9)
    assert errors(store.reports) == [(None, False)] * (len(transfer) - 1) + [
        (f"OSError: {step} failed", False),
        *[(None, False)] * 3,
    ]
    name = type(transfer[-1]).__name__
    message = f"The command {name} failed, and the engine waits for full weights: OSError: {step} failed"
    assert caplog.messages[0] == message
    assert (runner.broken, store.registrations) == (None, [LoadedWeights(0), LoadedWeights(1)])


def test_a_replica_that_loses_the_store_registers_again_with_the_weights_that_it_has(tmp_path: Path) -> None:
    store = ScriptedStore(Swap(SwapOptions()), end=PolicyStoreLost("The policy store died during the call."))
    runner = played(ScriptedWeights(), store, tmp_path, seconds=0.9)
    assert store.registrations == [LoadedWeights(0), LoadedWeights(1)]
    assert runner.broken is None


def test_a_replica_returns_the_keys_of_the_versions_that_it_has_loaded(tmp_path: Path) -> None:
    staged = stage(tmp_path, 1, key="of 1")
    never_loaded = stage(tmp_path, 2, key="of 2")
    lost = PolicyStoreLost("The policy store died during the call.")
    store = ScriptedStore(staged, Swap(SwapOptions()), never_loaded, end=lost)
    played(ScriptedWeights(), store, tmp_path, seconds=0.9)
    assert store.keys == [{}, {1: "of 1"}]
    transferred = ScriptedStore(*TRANSFER, FinishTransfer(3, "of 3"), end=lost)
    played(ScriptedWeights(), transferred, tmp_path, seconds=0.9)
    assert transferred.keys == [{}, {3: "of 3"}]


TRANSFER = (
    InitTransfer({"rank_offset": 1}, 30.0),
    StartTransfer(SwapOptions()),
    UpdateTransfer("names", 20.0),
    ApplyTransfer(),
)


@pytest.mark.parametrize(
    "end", [PolicyStoreLost("The policy store died during the call."), ReplicaNotRegistered("replica")]
)
def test_a_replica_that_loses_the_store_in_the_middle_of_a_transfer_is_broken(tmp_path: Path, end: Exception) -> None:
    store, weights = ScriptedStore(*TRANSFER, end=end), ScriptedWeights()
    runner = runner_of(weights, store, tmp_path)
    run(runner.run())
    assert weights.calls == [
        "init_transfer 1 within 30 s",
        "start_transfer keep",
        "update_transfer names within 20 s",
        "apply_transfer",
    ]
    assert errors(store.reports) == [(None, False)] * 4
    assert runner.broken == f"{type(end).__name__} in the middle of a weight transfer: {end}"
    assert store.registrations == [LoadedWeights(0)]


def test_where_the_weights_of_a_transfer_are_saved_is_reported(tmp_path: Path) -> None:
    start = StartTransfer(SwapOptions(), b"sent")
    adapter = stage(tmp_path / "store", 2, "adapter", "{}")
    store = ScriptedStore(start, adapter, FinishTransfer(3), SaveTransfer(3))
    weights = ScriptedWeights()
    played(weights, store, tmp_path / "node")
    assert errors(store.reports) == [(None, False)] * 4
    assert weights.calls[0] == "start_transfer keep to transfer.safetensors"
    *others, saved = [report.saved for report in store.reports]
    assert others == [None] * 3
    assert saved is not None
    assert (saved.version, saved.checksum, saved.size_bytes, saved.file.node_id) == (3, "5f3a", 4, "node")
    assert Path(saved.file.path).read_bytes() == b"sent"


def test_weights_that_could_not_be_saved_break_nothing(tmp_path: Path) -> None:
    store = ScriptedStore(FinishTransfer(3), SaveTransfer(3))
    runner = played(ScriptedWeights(fails="saved_transfer"), store, tmp_path)
    assert errors(store.reports) == [(None, False), ("OSError: saved_transfer failed", False)]
    assert runner.broken is None


def test_a_replica_that_loses_the_store_after_a_transfer_registers_again(tmp_path: Path) -> None:
    store = ScriptedStore(*TRANSFER, FinishTransfer(3), end=PolicyStoreLost("The policy store died during the call."))
    runner = played(ScriptedWeights(), store, tmp_path, seconds=0.9)
    assert store.registrations == [LoadedWeights(0), LoadedWeights(3)]
    assert runner.broken is None


SWAP = Swap(SwapOptions())


@pytest.mark.parametrize(
    ("commands", "checksums"),
    [
        ([SWAP, *TRANSFER, FinishTransfer(7)], []),
        ([ComputeChecksum()], [(LoadedWeights(0), "checksum of 0")]),
        ([SWAP, ComputeChecksum()], [(LoadedWeights(1), "checksum of 1")]),
        # The weights are replaced before their checksum is complete.
        ([ComputeChecksum(), SWAP], []),
        ([*TRANSFER, ComputeChecksum(), FinishTransfer(7)], []),
        ([*TRANSFER, FinishTransfer(7), ComputeChecksum()], [(LoadedWeights(7), "checksum of 7")]),
    ],
)
def test_a_checksum_is_computed_only_when_the_store_asks_and_is_of_weights_that_stay(
    tmp_path: Path, commands: list[Command], checksums: list[tuple[LoadedWeights, str]]
) -> None:
    store = ScriptedStore(*commands)
    played(ScriptedWeights(), store, tmp_path, seconds=CHECKSUM_S + 1)
    assert store.checksums == checksums
    assert errors(store.reports) == [(None, False)] * len(commands)


def test_a_checksum_lets_the_next_command_pass(tmp_path: Path) -> None:
    store = ScriptedStore(ComputeChecksum(), stage(tmp_path, 5))
    played(ScriptedWeights(), store, tmp_path, seconds=CHECKSUM_S / 2)
    assert (len(store.reports), store.checksums) == (2, [])


@pytest.mark.parametrize("command", [SWAP, StartTransfer(SwapOptions())])
def test_no_checksum_is_computed_while_the_weights_change(tmp_path: Path, command: Command) -> None:
    async def play() -> tuple[int, int]:
        weights = ScriptedWeights()
        runner = runner_of(weights, ScriptedStore(), tmp_path)
        await runner._carry_out(ComputeChecksum())
        await settled()
        before = weights.checksums_under_way
        await runner._carry_out(command)
        await settled()
        return before, weights.checksums_under_way

    assert run(play()) == (1, 0)
