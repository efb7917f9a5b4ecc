"""Whatever happens to a store and its replicas, in whatever order: all replicas end with the weights that are current.

Replicas start, fail at any command and die, versions of every kind are pushed, one by one and at once, transferred and
rolled back, policies are dropped, and the store dies with or without its folder, between updates and in the middle of
them.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deployments.policy.commands import AcceptRequests, Canary, LoadedWeights, SetAdapters, Stage, Swap
from deployments.policy.failures import PolicyFailure
from rollout_client.contract.policy import PolicyUpdate, SwitchOptions
from tests.deployments.policy.policy_world import PUSHES, World, adapter, checksum_of, settled_threads, taken, weights
from tests.deployments.policy.scripted_replicas import ScriptedReplica, Step
from tests.virtual_time import VirtualTimeLoop, until

INITIAL = {0: weights(1.0)}
FAILURES: tuple[Step, ...] = ("error", "die", "die after", "register again")
COMMANDS = (Stage, Swap, Canary, AcceptRequests, SetAdapters)
TRAINER = {"master_address": "10.0.0.4", "master_port": 29500}


class Pushed(NamedTuple):
    version: int
    makes: bytes
    is_adapter: bool
    update: "asyncio.Task[PolicyUpdate]"
    replicas: set[str]
    """Those that were alive before it."""


class CheckedEvents(list[tuple[str, str, int]]):
    """Notes the replicas that may accept requests and do not hold the version that is current then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.wrong: list[tuple[str, int, int]] = []

    def append(self, event: tuple[str, str, int]) -> None:
        name, what, version = event
        if what == "accept requests" and version != (current := self._world.versions.current):
            self.wrong.append((name, version, current))
        super().append(event)


class AnyStore(RuleBasedStateMachine):
    """Against the contents of all that was pushed and not refused."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.folder = TemporaryDirectory()
        self.contents: dict[int, bytes] = {}
        self.full = [0]
        """The versions with full weights, the current one last."""
        self.taken = 0
        """The highest number that a replica had when the store lost its folder."""
        self.named: dict[str, tuple[int, bytes]] = {}
        self.numbers_of_names: dict[str, int] = {}
        self.pushes: list[Pushed] = []
        """Under way."""
        self.cut_off: set[int] = set()
        """The versions of pushes that died with their store, whose uploads may be left."""
        self.value = 1.0
        """That makes each content another one."""
        self.may_end: set[str] = set()
        """The replicas that were ended or that fail at a command."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Each rule ends where nothing goes on without time passing: how fast threads are decides nothing."""

        async def worked() -> None:
            await work
            await settled_threads()

        self.runner.run(worked())

    def drawn(self, data: st.DataObject) -> ScriptedReplica:
        replicas = {replica.name: replica for replica in self.living}
        return replicas[data.draw(st.sampled_from(sorted(replicas)))]

    @initialize(is_rolling=st.booleans(), kept=st.integers(1, 3))
    def begin(self, is_rolling: bool, kept: int) -> None:
        async def begun() -> None:
            activation = "rolling" if is_rolling else "together"
            limits: dict[str, Any] = {"command_timeout_s": 30, "transfer_idle_s": 5, "keep_versions": kept}
            self.world = World(Path(self.folder.name) / "policy", activation=activation, **limits)
            self.events = self.world.cluster.events = CheckedEvents(self.world)

        self.run(begun())

    @property
    def living(self) -> list[ScriptedReplica]:
        return [replica for replica in self.world.replicas if replica.is_alive]

    @property
    def newest(self) -> int:
        return max(self.taken, *self.contents, 0)

    @property
    def is_troubled(self) -> bool:
        """Whether a push may be refused: a replica fails at it, or another push is under way."""
        return len(self.pushes) > 1 or any(replica.name in self.may_end for replica in self.world.replicas)

    @rule(command_s=st.sampled_from([0.0, 1.0, 10.0]))
    def start_replica(self, command_s: float) -> None:
        async def started() -> None:
            await self.world.replica(f"r{len(self.world.replicas)}", command_s=command_s)

        self.run(started())

    @precondition(lambda self: self.living)
    @rule(data=st.data(), step=st.sampled_from(FAILURES), command=st.sampled_from(COMMANDS))
    def let_fail(self, data: st.DataObject, step: Step, command: Any) -> None:
        replica = self.drawn(data)
        replica.at[command] = step
        self.may_end.add(replica.name)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def end_replica(self, data: st.DataObject) -> None:
        replica = self.drawn(data)
        self.may_end.add(replica.name)

        async def ended() -> None:
            replica.end()

        self.run(ended())

    @rule(kind=st.sampled_from([*PUSHES]), skipped=st.integers(0, 2))
    def begin_push(self, kind: str, skipped: int) -> None:
        async def begun() -> None:
            self.value += 1.0
            base = self.full[-1]
            content, makes, options = PUSHES[kind](self.value, base, (INITIAL | self.contents)[base])
            version, living = self.world.policy.next_number() + skipped, {each.name for each in self.living}
            pushing = self.world.pushing(version, content, **options)
            self.pushes.append(Pushed(version, makes, kind == "adapter", pushing, living))
            await until(lambda: pushing.done() or self.world.policy.next_number() > version)

        self.run(begun())

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule()
    def end_pushes(self) -> None:
        self.run(self.settled())

    @rule(back=st.integers(0, 3))
    def roll_back(self, back: int) -> None:
        async def rolled_back() -> None:
            await self.settled()
            to = [0, *(each.version for each in self.world.versions.all if each.kind != "adapter")][-1 - back :][0]
            version, living = self.world.policy.next_number(), {each.name for each in self.living}
            rolling = asyncio.create_task(self.world.store.roll_back(to, None, SwitchOptions()))
            self.pushes.append(Pushed(version, (INITIAL | self.contents)[to], False, rolling, living))
            await self.settled()

        self.run(rolled_back())

    @rule(name=st.sampled_from("ab"))
    def push_named(self, name: str) -> None:
        async def pushed() -> None:
            await self.settled()
            self.value += 1.0
            version, content = self.numbers_of_names.get(name, 0) + 1, adapter(self.value)
            try:
                await self.world.push(version, content, kind="adapter", name=name)
            except PolicyFailure:
                assert self.is_troubled
            else:
                self.named[name], self.numbers_of_names[name] = (version, content), version
            await self.settled()

        self.run(pushed())

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def drop_named(self, data: st.DataObject) -> None:
        async def dropped() -> None:
            await self.settled()
            if self.named:
                name = data.draw(st.sampled_from(sorted(self.named)))
                await self.world.store.drop_policy(name)
                del self.named[name]
            await self.settled()

        self.run(dropped())

    @precondition(lambda self: self.living)
    @rule(is_finished=st.booleans())
    def transfer(self, is_finished: bool) -> None:
        async def transferred() -> None:
            await self.settled()
            self.value += 1.0
            sent, version = weights(self.value), self.world.policy.next_number()
            for replica in self.living:
                replica.saves, replica.saved_checksum = sent, checksum_of(sent)
            size = (await self.world.store.state()).transfer_world_size
            if not self.living:
                return
            await self.world.store.init_transfer({**TRAINER, "world_size": size})
            await self.world.store.start_transfer(SwitchOptions())
            if is_finished:
                await self.world.store.finish_transfer(None)
                await until(lambda: self.world.versions.has_weights(version))
                self.accept(version, sent, is_adapter=False)
            else:
                await self.world.until_idle()
            await self.settled()

        self.run(transferred())

    @rule(is_folder_lost=st.booleans())
    def restart_store(self, is_folder_lost: bool) -> None:
        async def restarted() -> None:
            if is_folder_lost:
                await self.settled()
                self.taken = max((each.loaded.version for each in self.living), default=0)
                self.numbers_of_names = {k: v for each in self.living for k, v in each.named.items()}
                self.contents, self.full, self.named = {}, [0], {}
            for push in self.pushes:
                push.update.cancel()
                self.cut_off.add(push.version)
            await self.world.restart(is_folder_lost)
            for push in self.pushes:
                if self.world.versions.find(push.version) is not None:
                    self.accept(push.version, push.makes, push.is_adapter)
            self.pushes.clear()
            await self.settled()

        self.run(restarted())

    def accept(self, version: int, makes: bytes, is_adapter: bool) -> None:
        self.contents[version] = makes
        if not is_adapter:
            self.full = sorted([*self.full, version])
            self.named.clear()

    async def settled(self) -> None:
        """Waits until every push and every start has ended, and asserts what holds then."""
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0)), *(push.update for push in self.pushes)])
        for push in self.pushes:
            if isinstance(failure := push.update.exception(), PolicyFailure):
                assert self.is_troubled, failure
                continue
            update = push.update.result()
            assert (update.version, update.checksum) == (push.version, checksum_of(push.makes))
            assert {each.replica_id for each in update.replicas} <= push.replicas | {each.name for each in self.living}
            self.accept(push.version, push.makes, push.is_adapter)
        self.pushes.clear()
        current, desired = max(self.contents, default=0), LoadedWeights(self.full[-1])
        if current != self.full[-1]:
            desired = LoadedWeights(self.full[-1], current)
        registry = self.world.store.registry
        await until(
            lambda: (
                all(each.accepts_requests and each.loaded == desired for each in self.living)
                and not any(each.is_starting for each in registry.replicas)
            )
        )
        await asyncio.sleep(1.0)
        await settled_threads()
        await self.check(current, desired)

    async def check(self, current: int, desired: LoadedWeights) -> None:
        world = self.world
        assert (world.policy.current, world.versions.desired) == (current, desired)
        named = {name: version for name, (version, _) in self.named.items()}
        assert (await world.store.watch(None)).versions == {"": current, **named}
        state = await world.store.state()
        assert (state.next_version, state.updating_to) == (self.newest + 1, None)
        assert {each.version for each in state.uploads} <= {version for version in self.cut_off if version >= current}
        for replica in self.living:
            assert (replica.loaded, replica.is_on_trial, replica.named) == (desired, False, named)
            assert replica.adapters == {name: content for name, (_, content) in self.named.items()}
            for version in {desired.full, desired.version} & replica.files.keys():
                assert checksum_of(replica.files[version]) == checksum_of((INITIAL | self.contents)[version])
        assert set(world.cluster.killed) <= self.may_end
        assert self.events.wrong == []
        stored = [each.version for each in world.versions.all]
        kept = [version for version in self.full if version][-world.settings["keep_versions"] :]
        assert {*kept, *filter(None, (desired.full, current))} <= {*stored}
        for version in stored:
            assert checksum_of(world.versions.file(version).read_bytes()) == checksum_of(self.contents[version])
        of_names = {f"names/{name}/versions/{version}.safetensors" for name, version in named.items()}
        whole = {f"versions/{version}.safetensors" for version in stored}
        weights_of_all = {file for file in world.files() if file.endswith(".safetensors")}
        assert weights_of_all - {"versions/0.safetensors"} == whole | of_names

    @precondition(lambda self: self.newest and not self.pushes)
    @rule()
    def take_a_number_again(self) -> None:
        async def refused() -> None:
            async with taken(self.newest, newest=self.newest):
                await self.world.store.write_chunk(self.newest, None, 0, b"")

        self.run(refused())

    def teardown(self) -> None:
        async def ended() -> None:
            await self.settled()
            await self.world.end()

        self.run(ended())
        self.runner.close()
        self.folder.cleanup()


TestAnyStore = AnyStore.TestCase
TestAnyStore.settings = settings(stateful_step_count=20, max_examples=settings().max_examples // 2)
