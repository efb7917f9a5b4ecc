"""The replica registry: which replica a command reaches, what its sender learns, replacements, and the update lease."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.commands import (
    Command,
    CommandReport,
    ComputeChecksum,
    LoadedWeights,
    NumberedCommand,
    ReplicaNotRegistered,
    ReplicaRegistration,
    StartTransfer,
    Swap,
    SwapOptions,
)
from deployments.policy.replica_registry import (
    CHECKSUM_POLL_S,
    LIVENESS_POLL_S,
    LONG_POLL_S,
    CommandResult,
    RegisteredReplica,
    ReplicaLost,
    ReplicaRegistry,
)
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.scripted_replicas import RegistryCommandSource, ScriptedReplica, Step
from tests.fakes.cluster import ScriptedCluster
from tests.virtual_time import now, settled, synchronous, until

SWAP = Swap(SwapOptions())


class Actors(ScriptedCluster):
    """The actors of replicas `a`, `b`, ...; an actor is the replica's name."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[str] = set()
        self.registry = ReplicaRegistry(self, command_timeout_s=60.0)

    async def is_alive(self, actor: Any) -> bool:
        return actor not in self.dead

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def register(self, name: str, loaded: LoadedWeights | None = None) -> RegisteredReplica:
        return self.registry.register(ReplicaRegistration(name, name, 1, loaded or LoadedWeights()))

    def ask(
        self, replica: RegisteredReplica, command: Command = SWAP, timeout_s: float = 100.0
    ) -> asyncio.Task[CommandResult]:
        return asyncio.create_task(self.registry.send(replica, command, timeout_s=timeout_s))

    async def next_command(self, name: str, report: CommandReport | None = None) -> NumberedCommand:
        numbered = await self.registry.next_command(name, report)
        assert numbered is not None
        return numbered

    def poll(self, name: str, report: CommandReport | None = None) -> asyncio.Task[NumberedCommand | None]:
        return asyncio.create_task(self.registry.next_command(name, report))


async def lost(result: asyncio.Task[CommandResult]) -> str:
    lost = await result
    assert isinstance(lost, ReplicaLost)
    return str(lost)


async def test_a_replica_that_has_not_registered_is_refused() -> None:
    actors = Actors()
    actors.register("a")
    actors.registry.forget("a", "test")
    for name in ("a", "b"):
        with pytest.raises(ReplicaNotRegistered, match=name):
            await actors.registry.next_command(name, CommandReport(1, LoadedWeights()))
        with pytest.raises(ReplicaNotRegistered, match=name):
            actors.registry.record_checksum(name, LoadedWeights(), "c")
    actors.registry.forget("b", "test")


async def test_a_replica_that_takes_too_long_is_lost_and_its_late_report_counts() -> None:
    actors = Actors()
    replica = actors.register("a")
    asked = actors.ask(replica, timeout_s=7.5)
    numbered = await actors.next_command("a")
    assert await lost(asked) == "it did not report within 7.5 s"
    assert (now(), replica.awaited_reports, actors.registry.has(replica)) == (7.5, {}, True)
    assert await actors.registry.next_command("a", CommandReport(numbered.number, LoadedWeights(9))) is None
    assert (replica.loaded, replica.awaited_reports, now()) == (LoadedWeights(9), {}, 7.5 + LONG_POLL_S)


async def test_a_replica_that_dies_is_lost_forgotten_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    actors = Actors()
    a, b, c = (actors.register(name) for name in "abc")
    asked = actors.ask(a)
    await actors.next_command("a")
    actors.dead |= {"a", "c"}
    assert await lost(asked) == "it died"
    assert now() <= LIVENESS_POLL_S
    assert (actors.registry.replicas, await lost(actors.ask(a))) == ([b, c], "it has left")
    for _ in range(2):
        await actors.registry.drop_dead()
    assert (actors.registry.replicas, actors.registry.has(c)) == ([b], False)
    assert [(record.getMessage(), vars(record)["replica_id"]) for record in caplog.records] == [
        ("A generator replica died.", "a"),
        ("A generator replica died.", "c"),
    ]
    assert {(record.name, record.levelname) for record in caplog.records} == {("rollout_service.policy", "WARNING")}


async def test_a_replica_that_registers_again_during_the_check_of_its_life_stays() -> None:
    class RegistersAgain(ScriptedCluster):
        async def is_alive(self, _actor: Any) -> bool:
            registry.register(ReplicaRegistration("a", "young", 1))
            return False

    registry = ReplicaRegistry(RegistersAgain(), command_timeout_s=60.0)
    registry.register(ReplicaRegistration("a", "old", 1))
    await registry.drop_dead()
    assert [replica.registration.actor for replica in registry.replicas] == ["young"]


async def test_a_checksum_is_of_the_weights_that_it_names() -> None:
    actors = Actors()
    replica = actors.register("a", LoadedWeights(5))
    actors.registry.record_checksum("a", LoadedWeights(4), "old")
    known = [replica.checksum]
    actors.registry.record_checksum("a", LoadedWeights(5), "new")
    known.append(replica.checksum)
    for loaded in (LoadedWeights(5), LoadedWeights(5, adapter=6)):
        await actors.registry.next_command("a", CommandReport(1, loaded))
        known.append(replica.checksum)
    assert known == [None, "new", "new", None]


async def test_checksums_are_computed_once_when_somebody_asks_who_waits_for_all() -> None:
    actors = Actors()
    replica, other = actors.register("a"), actors.register("b")
    actors.registry.record_checksum("b", LoadedWeights(), "of b")
    await actors.registry.ask_for_checksums(0.0)
    assert replica.commands.empty()
    for _ in range(2):
        await actors.registry.ask_for_checksums(1.0)
    assert replica.checksum is None
    assert 2.0 <= now() <= 2.0 + 2 * CHECKSUM_POLL_S
    assert (await actors.next_command("a")).command == ComputeChecksum()
    assert (replica.commands.empty(), other.is_checksum_asked) == (True, False)
    asked = asyncio.create_task(actors.registry.ask_for_checksums(100.0))
    await asyncio.sleep(10.0)
    assert not asked.done()
    actors.registry.record_checksum("a", LoadedWeights(), "of a")
    await asked
    assert now() <= 12.0 + 3 * CHECKSUM_POLL_S


@pytest.mark.parametrize("command", [SWAP, StartTransfer(SwapOptions()), None])
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_replica_whose_weights_were_reloaded_is_asked_again(command: Command | None, is_known: bool) -> None:
    actors = Actors()
    replica = actors.register("a")
    await actors.registry.ask_for_checksums(1.0)
    first = await actors.next_command("a")
    if is_known:
        actors.registry.record_checksum("a", LoadedWeights(), "of the first load")
    report = CommandReport(first.number, LoadedWeights())
    if command is None:
        report = CommandReport(first.number, LoadedWeights(1))
    else:
        swapping = actors.ask(replica, command)
        second = await actors.next_command("a", report)
        assert second.command == command
        report = CommandReport(second.number, LoadedWeights())
    polling = actors.poll("a", report)
    await (settled() if command is None else swapping)
    assert replica.checksum is None
    asked = asyncio.create_task(actors.registry.ask_for_checksums(100.0))
    third = await polling
    assert third is not None
    assert third.command == ComputeChecksum()
    asked.cancel()


def command_of(name: str) -> Command:
    return Swap(SwapOptions(mode="keep" if name == "a" else "wait"))


EVENTS = st.tuples(st.sampled_from(["register", "ask", "poll", "cut off", "die"]), st.sampled_from("ab"))


@given(st.lists(EVENTS, max_size=30))
@synchronous
async def test_whatever_happens_each_command_reaches_its_replica_once_or_is_lost(events: list[tuple[str, str]]) -> None:
    actors, polls = Actors(), dict[str, asyncio.Task[NumberedCommand | None]]()
    waiting: dict[str, list[asyncio.Task[CommandResult]]] = {"a": [], "b": []}
    fetched: dict[str, dict[int, asyncio.Task[CommandResult]]] = {"a": {}, "b": {}}
    numbers: list[int] = []

    async def leave(name: str, why: str) -> None:
        left = [*waiting[name], *fetched[name].values()]
        await settled()
        assert [await lost(result) for result in left] == [why] * len(left)
        waiting[name], fetched[name] = [], {}
        if (poll := polls.pop(name, None)) is not None:
            poll.cancel()

    async def happen(event: str, name: str) -> None:
        replica = next((each for each in actors.registry.replicas if each.replica_id == name), None)
        if event == "register" or replica is None:
            actors.dead.discard(name)
            actors.register(name)
            await leave(name, "it registered again")
        elif event == "die":
            actors.dead.add(name)
            await actors.registry.drop_dead()
            await leave(name, "it died")
        elif event == "ask":
            waiting[name].append(actors.ask(replica, command_of(name)))
        elif event == "poll" and name not in polls:
            report = next((CommandReport(number, LoadedWeights(number)) for number in fetched[name]), None)
            polls[name] = actors.poll(name, report)
            if report is not None:
                assert await fetched[name].pop(report.command_number) == report
                assert replica.loaded == report.loaded
        elif event == "cut off" and name in polls:
            waiting[name].append(actors.ask(replica, command_of(name)))
            await asyncio.sleep(0)
            polls.pop(name).cancel()

    for event, name in events:
        await happen(event, name)
        await settled()
        if name in polls and waiting[name]:
            numbered = await polls.pop(name)
            assert numbered is not None
            assert (numbered.command, numbered.number in numbers) == (command_of(name), False)
            numbers.append(numbered.number)
            fetched[name][numbered.number] = waiting[name].pop(0)
        unanswered = [result for each in "ab" for result in (*waiting[each], *fetched[each].values())]
        assert not any(result.done() for result in unanswered)
        if not unanswered:
            watched = asyncio.all_tasks() - {asyncio.current_task(), *polls.values()}
            assert watched == set(), "nobody is watched who has reported"
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await settled()


# Loading and replacing


def test_a_replica_that_is_replaced_is_ended_and_logged_if_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    actors = Actors()
    first, gone, last = (actors.register(name) for name in "abc")
    actors.registry.replace(first, "out of memory", version=7)
    actors.registry.forget("b", "it died")
    actors.registry.replace_if_registered(gone, "out of memory")
    assert (actors.killed, actors.registry.replicas) == (["a"], [last])
    [record] = caplog.records
    assert (record.name, record.levelname) == ("rollout_service.policy", "WARNING")
    assert record.getMessage() == "A generator replica is replaced: out of memory"
    assert (vars(record)["replica_id"], vars(record)["version"]) == ("a", 7)


async def loading(*script: Step) -> tuple[ReplicaRegistry, ScriptedReplica, "asyncio.Task[bool]"]:
    """A replica that loads full weights and then an adapter, one second for each command."""
    cluster = ScriptedCluster()
    registry = ReplicaRegistry(cluster, command_timeout_s=60.0)
    actor = await ScriptedReplica("r0", RegistryCommandSource(registry), cluster, script, command_s=1.0).start()
    payloads = [a_payload(1), a_payload(2, "adapter", "{}")]
    return registry, actor, asyncio.create_task(registry.load(registry.replicas[0], payloads))


async def test_nothing_is_generated_with_full_weights_before_their_adapter() -> None:
    _, actor, done = await loading()
    await until(lambda: actor.loaded == LoadedWeights(1))
    assert actor.is_on_trial
    assert await done
    assert (actor.loaded, actor.is_on_trial) == (LoadedWeights(1, adapter=2), False)
    actor.end()


@pytest.mark.parametrize(
    ("step", "killed", "left"),
    [("error", ["r0"], []), ("hang", ["r0"], []), ("die", [], []), ("register again", [], ["r0"])],
)
@pytest.mark.parametrize("before", range(4))
async def test_a_replica_that_fails_to_load_is_replaced_if_it_is_there(
    step: Step, before: int, killed: list[str], left: list[str]
) -> None:
    came: list[Step] = ["ok"] * before
    registry, actor, done = await loading(*came, step)
    assert not await done
    assert (actor.cluster.killed, [each.replica_id for each in registry.replicas]) == (killed, left)
    actor.end()
