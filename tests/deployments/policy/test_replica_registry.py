"""The replica registry: which replica a command reaches, and what its sender learns."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.commands import (
    AcceptRequests,
    Command,
    CommandCosts,
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
from tests import virtual_time
from tests.deployments.policy.scripted_replicas import ScriptedCluster
from tests.virtual_time import now, run, settled

SWAP = Swap(SwapOptions())


class Actors(ScriptedCluster):
    """The actors of replicas `a`, `b`, ...; an actor is the replica's name."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[str] = set()
        self.registry = ReplicaRegistry(self, command_timeout_s=60.0)

    async def is_alive(self, actor: Any) -> bool:
        return actor not in self.dead

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


def test_replicas_are_listed_in_the_order_in_which_they_registered() -> None:
    actors = Actors()
    for name in "bac":
        actors.register(name)
    actors.register("b", LoadedWeights(3))
    assert [(replica.replica_id, replica.loaded.version) for replica in actors.registry.replicas] == [
        ("a", 0),
        ("c", 0),
        ("b", 3),
    ]


@virtual_time.test
async def test_each_command_reaches_its_replica_and_the_report_its_sender() -> None:
    actors = Actors()
    a, b = actors.register("a"), actors.register("b")
    asked = [actors.ask(a, SWAP), actors.ask(b, AcceptRequests()), actors.ask(a, AcceptRequests())]
    of_b = await actors.next_command("b")
    first = await actors.next_command("a")
    assert (first.command, of_b.command) == (SWAP, AcceptRequests())
    first_report = CommandReport(first.number, LoadedWeights(7), costs=CommandCosts(swap_s=0.5))
    second = await actors.next_command("a", first_report)
    assert second.command == AcceptRequests()
    assert len({first.number, second.number, of_b.number}) == 3
    assert await asked[0] == first_report
    assert (asked[1].done(), asked[2].done()) == (False, False)
    polls = [
        actors.poll("a", CommandReport(second.number, LoadedWeights(7))),
        actors.poll("b", CommandReport(of_b.number, LoadedWeights())),
    ]
    assert [getattr(result, "command_number", None) for result in await asyncio.gather(*asked[1:])] == [
        of_b.number,
        second.number,
    ]
    assert (a.loaded, b.loaded) == (LoadedWeights(7), LoadedWeights())
    assert now() == 0.0
    for poll in polls:
        poll.cancel()


@virtual_time.test
async def test_a_poll_without_a_command_ends_after_a_while() -> None:
    actors = Actors()
    actors.register("a")
    assert await actors.registry.next_command("a", None) is None
    assert now() == LONG_POLL_S


@virtual_time.test
async def test_a_command_is_not_lost_with_a_poll_that_was_cut_off() -> None:
    actors = Actors()
    replica = actors.register("a")
    poll = actors.poll("a")
    await settled()
    actors.ask(replica)
    await asyncio.sleep(0)
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
    assert (await actors.next_command("a")).command == SWAP


@virtual_time.test
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


@virtual_time.test
async def test_registering_again_ends_the_commands_before() -> None:
    actors = Actors()
    replica = actors.register("a")
    taken = actors.ask(replica)
    await actors.next_command("a")
    old_poll = actors.poll("a")
    await settled()
    waiting = asyncio.create_task(actors.registry.send(replica, SWAP, timeout_s=100.0))
    again = actors.register("a", LoadedWeights(4))
    assert (await lost(taken), await lost(waiting)) == ("it registered again", "it has left")
    assert await lost(actors.ask(replica)) == "it has left"
    assert (actors.registry.has(replica), actors.registry.has(again)) == (False, True)
    assert (again.loaded, again.accepts_requests) == (LoadedWeights(4), False)
    actors.ask(again, AcceptRequests())
    assert (await actors.next_command("a")).command == AcceptRequests()
    await settled()
    assert not old_poll.done()
    old_poll.cancel()


@virtual_time.test
async def test_a_replica_that_takes_too_long_is_lost_and_its_late_report_only_updates_what_it_holds() -> None:
    actors = Actors()
    replica = actors.register("a")
    asked = actors.ask(replica, timeout_s=7.5)
    numbered = await actors.next_command("a")
    assert await lost(asked) == "it did not report within 7.5 s"
    assert now() == 7.5
    assert replica.awaited_reports == {}
    assert actors.registry.has(replica)
    assert await actors.registry.next_command("a", CommandReport(numbered.number, LoadedWeights(9))) is None
    assert (replica.loaded, replica.awaited_reports) == (LoadedWeights(9), {})


def test_a_replica_that_dies_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        actors = Actors()
        asked = actors.ask(actors.register("a"))
        actors.dead.add("a")
        await actors.registry.drop_dead()
        await lost(asked)
        await actors.registry.drop_dead()

    run(story())
    [record] = caplog.records
    assert (record.name, record.levelname, record.getMessage(), vars(record)["replica_id"]) == (
        "rollout_service.policy",
        "WARNING",
        "A generator replica died.",
        "a",
    )


@virtual_time.test
async def test_a_replica_is_watched_only_until_it_has_reported() -> None:
    actors = Actors()
    asked = actors.ask(actors.register("a"))
    numbered = await actors.next_command("a")
    poll = actors.poll("a", CommandReport(numbered.number, LoadedWeights()))
    await asked
    await settled()
    assert asyncio.all_tasks() == {asyncio.current_task(), poll}
    poll.cancel()


@virtual_time.test
async def test_a_replica_that_dies_is_lost_and_forgotten() -> None:
    actors = Actors()
    a, b = actors.register("a"), actors.register("b")
    asked = actors.ask(a)
    await actors.next_command("a")
    actors.dead |= {"a", "b"}
    assert await lost(asked) == "it died"
    assert now() <= LIVENESS_POLL_S
    assert actors.registry.replicas == [b]


@virtual_time.test
async def test_the_dead_are_forgotten() -> None:
    actors = Actors()
    a, b, c = (actors.register(name) for name in "abc")
    actors.dead |= {"a", "c"}
    await actors.registry.drop_dead()
    assert actors.registry.replicas == [b]
    assert not actors.registry.has(a)
    assert not actors.registry.has(c)


@virtual_time.test
async def test_a_replica_that_registers_again_during_the_check_of_its_life_stays() -> None:
    class RegistersAgain(ScriptedCluster):
        async def is_alive(self, _actor: Any) -> bool:
            registry.register(ReplicaRegistration("a", "young", 1))
            return False

    registry = ReplicaRegistry(RegistersAgain(), command_timeout_s=60.0)
    registry.register(ReplicaRegistration("a", "old", 1))
    await registry.drop_dead()
    assert [replica.registration.actor for replica in registry.replicas] == ["young"]


@virtual_time.test
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


@virtual_time.test
async def test_checksums_are_computed_only_when_somebody_asks_and_once_for_the_same_weights() -> None:
    actors = Actors()
    replica = actors.register("a")
    await actors.registry.ask_for_checksums(0.0)
    assert replica.commands.empty()
    for _ in range(2):
        await actors.registry.ask_for_checksums(1.0)
    assert replica.checksum is None
    assert 2.0 <= now() <= 2.0 + 2 * CHECKSUM_POLL_S
    assert (await actors.next_command("a")).command == ComputeChecksum()
    assert replica.commands.empty()


@virtual_time.test
async def test_whoever_asks_for_checksums_waits_until_all_are_known() -> None:
    actors = Actors()
    actors.register("a")
    actors.register("b")
    actors.registry.record_checksum("a", LoadedWeights(), "of a")
    asked = asyncio.create_task(actors.registry.ask_for_checksums(100.0))
    assert (await actors.next_command("b")).command == ComputeChecksum()
    await asyncio.sleep(10.0)
    assert not asked.done()
    actors.registry.record_checksum("b", LoadedWeights(), "of b")
    await asked
    assert now() <= 10.0 + CHECKSUM_POLL_S
    assert not actors.registry.replicas[0].is_checksum_asked, "its checksum was known"


@pytest.mark.parametrize("command", [SWAP, StartTransfer(SwapOptions())])
@pytest.mark.parametrize("is_known", [True, False])
@virtual_time.test
async def test_a_replica_that_loads_the_same_version_again_is_asked_again_for_its_checksum(
    command: Command, is_known: bool
) -> None:
    actors = Actors()
    replica = actors.register("a")
    await actors.registry.ask_for_checksums(1.0)
    first = await actors.next_command("a")
    if is_known:
        actors.registry.record_checksum("a", LoadedWeights(), "of the first load")
    swapping = actors.ask(replica, command)
    second = await actors.next_command("a", CommandReport(first.number, LoadedWeights()))
    polling = actors.poll("a", CommandReport(second.number, LoadedWeights()))
    await swapping
    assert replica.checksum is None
    asked = asyncio.create_task(actors.registry.ask_for_checksums(100.0))
    third = await polling
    assert third is not None
    assert (second.command, third.command) == (command, ComputeChecksum())
    actors.registry.record_checksum("a", LoadedWeights(), "of the second load")
    await asked


@virtual_time.test
async def test_a_replica_whose_weights_change_before_their_checksum_is_known_is_asked_again() -> None:
    actors = Actors()
    actors.register("a")
    asked = asyncio.create_task(actors.registry.ask_for_checksums(100.0))
    first = await actors.next_command("a")
    second = await actors.next_command("a", CommandReport(first.number, LoadedWeights(1)))
    assert [first.command, second.command] == [ComputeChecksum()] * 2
    asked.cancel()


@given(
    st.lists(
        st.tuples(st.sampled_from(["register", "ask", "poll", "cut off", "die"]), st.sampled_from("ab")), max_size=30
    )
)
def test_whatever_happens_a_command_reaches_its_replica_at_most_once(events: list[tuple[str, str]]) -> None:
    async def story() -> None:
        actors = Actors()
        for name in "ab":
            actors.register(name)
        asked: dict[str, list[asyncio.Task[CommandResult]]] = {"a": [], "b": []}
        polls: dict[str, list[asyncio.Task[NumberedCommand | None]]] = {"a": [], "b": []}

        async def happen(event: str, name: str) -> None:
            replica = next((replica for replica in actors.registry.replicas if replica.replica_id == name), None)
            if event == "register" or replica is None:
                actors.dead.discard(name)
                actors.register(name)
            elif event == "ask":
                asked[name].append(actors.ask(replica, command_of(name)))
            elif event == "poll":
                polls[name].append(actors.poll(name))
            elif event == "cut off" and polls[name]:
                polls[name][-1].cancel()
            elif event == "die":
                actors.dead.add(name)
                await actors.registry.drop_dead()

        for event in events:
            await happen(*event)
        await settled()
        for name in "ab":
            commands = [poll.result() for poll in polls[name] if poll.done() and not poll.cancelled()]
            numbers = [numbered.number for numbered in commands if numbered is not None]
            assert len(numbers) == len(set(numbers)) <= len(asked[name])
            assert all(numbered is None or numbered.command == command_of(name) for numbered in commands)
        everything: list[asyncio.Task[Any]] = [*asked["a"], *asked["b"], *polls["a"], *polls["b"]]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)

    run(story())


def command_of(name: str) -> Command:
    return Swap(SwapOptions(mode="keep" if name == "a" else "wait"))
