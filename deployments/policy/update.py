"""Changes which version of a policy is current: one coroutine for each update, from its lease to its activation.

An update stages the version everywhere, tries it on one replica, makes it current on disk, and lets the others load it.
Guarantees: two updates never mix; until one replica has generated with the version, no generation of a rollout uses it;
if it cannot be used, that replica goes back to the weights that are current, and nothing else has changed; once the
version is current on disk, a replica that fails is replaced, and its successor starts with the new version. So all
replicas end at the same version, and it is published once they have loaded it. In a rolling activation they change one
after the other, and whoever watches is told after each which have the version.

A version of the policy without a name pauses generation, but nowhere before every replica has staged the new weights or
has failed. What comes as a delta is staged once the replica's node has made the weights and found their checksum right
(without replicas the store does), and is written as full weights behind the activation. A version of a named policy is
an adapter beside the full weights: it pauses nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deployments.policy.commands import (
    AcceptRequests,
    Canary,
    Command,
    CommandCosts,
    CommandReport,
    SetAdapters,
    Stage,
    Swap,
    SwapOptions,
    VersionPayload,
)
from deployments.policy.failures import PolicyFailure, PolicyNotCurrent, VersionUntried, WeightsRefused
from deployments.policy.policies import Policy, PolicyRegistry
from deployments.policy.replica_loading import ReplicaLoading
from deployments.policy.replica_registry import (
    CommandResult,
    RegisteredReplica,
    ReplicaLost,
    ReplicaRegistry,
    ReplicaTimedOut,
    error_of,
)
from deployments.policy.versions import Version
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import PolicyUpdate, PushOptions, ReplicaUpdate

OnSwapped = Callable[[frozenset[str]], Awaitable[None]]


async def _update_in_two_phases(
    registry: ReplicaRegistry,
    replicas: Sequence[RegisteredReplica],
    version: int,
    payloads: tuple[VersionPayload, ...],
    swap: SwapOptions | None,
    make_current: Callable[[bool], Awaitable[None]],
    go_back: Callable[[RegisteredReplica], Awaitable[object]],
    on_swapped: OnSwapped | None = None,
) -> list[ReplicaUpdate]:
    """Lets one replica after the other try the version, until one is not lost meanwhile, and then all of them use it.

    Returns the outcome of each replica, in order.

    Args:
        payloads: the version alone; of a named policy all adapters that replicas serve from then on.
        swap: how replicas change to a version of the policy without a name; `None` for a named one.
        make_current: makes the version current on disk. Gets whether the canary shows an effect of the new weights.
        go_back: for the replica that holds the version, and uses it for no rollout, if it does not become current.
        on_swapped: makes the replicas change one after the other. Called after each with all that have changed.

    Raises:
        WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
        VersionUntried: every replica was lost before it had tried them.
        Exception: what `make_current` raises.
    """
    size_bytes = sum(payload.size_bytes for payload in payloads)
    results: dict[RegisteredReplica, CommandResult] = {}
    costs = dict.fromkeys(replicas, CommandCosts())

    async def send(commands: Mapping[RegisteredReplica, Command]) -> None:
        for replica, result in (await registry.send_each(commands, size_bytes)).items():
            results[replica] = result
            if isinstance(result, CommandReport):
                costs[replica] += result.costs

    def intact() -> list[RegisteredReplica]:
        """The replicas where all that was sent so far has succeeded, if anything was."""
        return [each for each in replicas if each not in results or error_of(results[each]) is None]

    def outcome(replica: RegisteredReplica) -> ReplicaUpdate:
        return registry.outcome(replica, results[replica], version, costs[replica])

    accept: Command
    load: Command
    trial: Sequence[Command]
    if swap is None:
        accept = load = SetAdapters(payloads, registry.canary_timeout_s())
        trial, refusal = [replace(load, is_trial=True)], "a replica could not load them or generate with them"
    else:
        accept, load, refusal = AcceptRequests(), Swap(swap), "a replica could not generate with them and went back"
        trial = [Swap(swap, is_trial=True), Canary(registry.canary_timeout_s(size_bytes))]
        await send(dict.fromkeys(replicas, Stage(*payloads)))
        _refuse_if_all_refused(list(results.values()))
    on_trial: RegisteredReplica | None = None
    for replica in intact():
        for command in trial:
            await send({replica: command})
            if (error := error_of(results[replica])) is not None:
                break
        result = results[replica]
        if isinstance(result, ReplicaLost) and not isinstance(result, ReplicaTimedOut):
            # It left or died meanwhile, which proves nothing about the version.
            continue
        if error is not None:
            if isinstance(result, ReplicaLost) or result.broken:
                registry.replace_if_registered(replica, error, version)
            else:
                await go_back(replica)
            raise WeightsRefused.of("weights", f"{refusal}: {error}")
        on_trial = replica
        break
    if replicas and on_trial is None:
        for replica, result in results.items():
            registry.replace_if_registered(replica, str(error_of(result)), version)
        reasons = "; ".join(sorted({str(error_of(result)) for result in results.values()}))
        raise VersionUntried.of("weights", f"all replicas were lost before that: {reasons}")
    last = None if on_trial is None else results[on_trial]
    try:
        await make_current(not (isinstance(last, CommandReport) and last.changes_nothing))
    except Exception:
        if on_trial is not None:
            await go_back(on_trial)
        raise
    others = [each for each in intact() if each is not on_trial]
    commands = ({} if on_trial is None else {on_trial: accept}) | dict.fromkeys(others, load)
    outcomes: dict[RegisteredReplica, ReplicaUpdate] = {}
    for together in [commands] if on_swapped is None else [{each: command} for each, command in commands.items()]:
        await send(together)
        # One that failed is replaced before the next one changes.
        outcomes |= {replica: outcome(replica) for replica in together}
        if on_swapped is not None:
            swapped = [each for each, update in outcomes.items() if update.status == "swapped"]
            await on_swapped(frozenset(each.replica_id for each in swapped))
    return [outcomes.get(replica) or outcome(replica) for replica in replicas]


def _refuse_if_all_refused(staged: Sequence[CommandResult]) -> None:
    """Raises `WeightsRefused` if every replica that is alive and intact failed to stage the weights.

    A replica that died or broke proves nothing about the weights.
    """
    reports = [result for result in staged if isinstance(result, CommandReport) and not result.broken]
    errors = [report.error for report in reports if report.error is not None]
    if errors and len(errors) == len(reports):
        raise WeightsRefused.of("weights", f"the engine cannot take them: {errors[0]}")


OTHER_BASE = (
    "the adapter was trained on these full weights, and others are current, version {full}: make its own current first "
    "(POST /policy/rollback), or train it on those"
)
NO_EFFECT = (
    "The weights change no log-probability of the canary: the change is too small for the engine's precision, or the "
    "engine does not generate with them."
)
NO_EFFECT_OF_ADAPTER = (
    "The adapter changes no log-probability of the canary: it is zero, or too small for the engine's precision. "
    "Rollouts are as without it."
)
logger = logging.getLogger("rollout_service.policy")


class Updates:
    """The updates of all policies.

    Args:
        is_rolling: replicas change to a version of the policy without a name one after the other.
    """

    def __init__(
        self,
        policies: PolicyRegistry,
        registry: ReplicaRegistry,
        loading: ReplicaLoading,
        tasks: BackgroundTasks,
        is_rolling: bool,
    ) -> None:
        self._policies = policies
        self._full = policies.unnamed.versions
        self._registry = registry
        self._loading = loading
        self._update_lock = registry.update_lock
        self._tasks = tasks
        self._is_rolling = is_rolling

    def refuse(self, policy: Policy, version: int, options: PushOptions) -> None:
        """Raises what `update` would raise at once, for callers that have to prepare the version first."""
        policy.versions.refuse_taken(version)
        self._update_lock.refuse_if_busy(options)

    async def update(self, policy: Policy, info: Version, file: Path, options: PushOptions) -> PolicyUpdate:
        """Waits for the update lease, then loads the version into every replica.

        Args:
            info: of an adapter, `base` is filled in here: the full weights that are current then.
            file: the weights, or a delta, on the file system of the store's folder.

        Raises:
            UpdateUnderWay: another update holds the lease, and the caller does not wait.
            PolicyNotCurrent: an adapter was trained on other full weights than the current ones.
            VersionRefused: another update has taken the number meanwhile, or a higher one.
            WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
            VersionUntried: every replica was lost before it had tried them.
        """
        self.refuse(policy, info.version, options)
        async with self._update_lock.lease(f"version {policy.label(info.version)} is being loaded by the replicas"):
            # Once the version is listed, a replica that dies is part of the update, and its outcome says so.
            await self._registry.drop_dead()
            warnings: list[str] = []
            if info.kind == "adapter":
                full = self._full.desired.full
                if options.base is not None and not self._full.are_same(options.base, full):
                    raise PolicyNotCurrent.of("base", OTHER_BASE.format(full=full), options.base)
                info = info.model_copy(update={"base": full})
            else:
                info = info.model_copy(update={"keeps_prefix_cache": not options.reset_prefix_cache})
            async with policy.versions.adding(info, file):
                try:
                    replicas = await self._update_replicas(policy, info, options, warnings)
                finally:
                    if policy.versions.current == info.version:
                        await self.activate(policy)
        return policy.update_to(info, replicas, warnings)

    async def drop(self, name: str) -> None:
        """Serves the policy no longer; its generations under way end with its adapter.

        Raises:
            PolicyUnknown: it is not served.
        """
        self._policies.served(name)
        async with self._update_lock.lease(f"the policy {name} is being dropped"):
            await self._policies.drop(name)
            base = self._full.desired.full
            await self._loading.set_adapters([each for each in self._registry.started if each.loaded.full == base])

    async def activate(self, policy: Policy) -> None:
        """Follows a change of the version that is current on disk: publishes it, removes what it makes useless, and
        lets replicas that waited for it accept requests. The caller holds the update lease."""
        await self._policies.publish(policy)
        logger.info("Version %s is current.", policy.label(policy.current), extra=policy.log_extra(policy.current))
        self.remove_old_versions(policy)
        if policy.name is None:
            await self._loading.start_accepting()
            self._tasks.start(self.write_full_weights())

    def remove_old_versions(self, policy: Policy) -> None:
        policy.remove_old_versions(self._loading.pinned)
        self._tasks.start(self._policies.clean_up())

    async def write_full_weights(self) -> None:
        """Writes the current full weights, if only a delta of them is stored yet."""
        version = self._full.desired.full
        if not self._full.is_delta(version):
            return
        try:
            await asyncio.to_thread(self._full.file, version)
            self.remove_old_versions(self._policies.unnamed)
        except (PolicyFailure, OSError) as error:
            extra = {"version": version}
            logger.error("The full weights of version %d could not be made.", version, exc_info=error, extra=extra)

    async def _update_replicas(
        self, policy: Policy, info: Version, options: PushOptions, warnings: list[str]
    ) -> list[ReplicaUpdate]:
        """Loads the version into the replicas that have started; an adapter only into those that hold its base.

        The others load it before they accept requests.
        """
        replicas = [each for each in self._registry.started if info.kind != "adapter" or each.loaded.full == info.base]
        payloads: tuple[VersionPayload, ...]
        swap = SwapOptions(options.mode, options.reset_prefix_cache) if policy.name is None else None
        if swap is not None:
            # Where no node applies a delta, the store finds out whether it makes what its sender says.
            is_delta = bool(replicas) and info.base == self._full.desired.full
            payloads = (await self._loading.payload(info.version, is_delta),)
        else:
            payloads = await asyncio.to_thread(self._loading.adapters, policy, info)

        async def make_current(shows_effect: bool) -> None:
            if not shows_effect:
                warnings.extend(await asyncio.to_thread(self._doubts_about, info))
            policy.versions.make_current(info)

        async def go_back(replica: RegisteredReplica) -> None:
            if policy.name is None:
                await self._loading.go_back(replica, replica.loaded)

        async def tell(replicas: frozenset[str]) -> None:
            await self._policies.tell_rolling(info.version, replicas)

        on_swapped = tell if self._is_rolling and policy.name is None else None
        return await _update_in_two_phases(
            self._registry, replicas, info.version, payloads, swap, make_current, go_back, on_swapped
        )

    def _doubts_about(self, info: Version) -> list[str]:
        """Warnings about a version that changes no log-probability of the canary."""
        if info.kind == "adapter":
            return [NO_EFFECT_OF_ADAPTER]
        before = self._full.desired.full
        is_same = self._full.has_weights(before) and self._full.checksum(before) == info.checksum
        return [] if is_same else [NO_EFFECT]
