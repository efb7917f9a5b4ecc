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
from collections.abc import Awaitable, Callable, Sequence
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


class TwoPhaseUpdate:
    """One update of `replicas`: `try_version`, then the version is made current on disk, then `finish`.

    Args:
        payloads: the version alone; of a named policy all adapters that replicas serve from then on.
        swap: how replicas change to a version of the policy without a name; `None` for a named one.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        replicas: Sequence[RegisteredReplica],
        version: int,
        payloads: tuple[VersionPayload, ...],
        swap: SwapOptions | None,
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._version = version
        self._size_bytes = sum(payload.size_bytes for payload in payloads)
        self._results: dict[RegisteredReplica, CommandResult] = {}
        """The last result of each replica."""
        self._costs = dict.fromkeys(replicas, CommandCosts())
        self.on_trial: RegisteredReplica | None = None
        """The replica that holds the version, and uses it for no rollout before `finish`. If the version does not
        become current, it has to go back."""
        self._stage: Command | None = None
        """For every replica, before one of them tries the version by `_trial`."""
        self._trial: Sequence[Command]
        self._accept: Command
        """For that replica, once the version is current; `_load` for all others."""
        self._load: Command
        if swap is None:
            self._accept = self._load = SetAdapters(payloads, registry.canary_timeout_s())
            self._trial = (replace(self._load, is_trial=True),)
            self._refusal = "a replica could not load them or generate with them"
        else:
            canary = Canary(registry.canary_timeout_s(self._size_bytes))
            self._stage, self._trial = Stage(*payloads), (Swap(swap, is_trial=True), canary)
            self._accept, self._load = AcceptRequests(), Swap(swap)
            self._refusal = "a replica could not generate with them and went back"

    async def try_version(self) -> bool:
        """Lets one replica after the other try the version, until one is not lost meanwhile.

        Returns whether the canary shows an effect of the new weights; true without replicas.

        Raises:
            WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
            VersionUntried: every replica was lost before it had tried them.
        """
        if self._stage is not None:
            await self._send_each(self._replicas, [self._stage] * len(self._replicas))
            _refuse_if_all_refused(list(self._results.values()))
        for replica in [each for each in self._replicas if self._has_succeeded(each)]:
            result = await self._try_on(replica)
            error = error_of(result)
            if isinstance(result, ReplicaLost) and not isinstance(result, ReplicaTimedOut):
                # It left or died meanwhile, which proves nothing about the version.
                continue
            if error is None:
                self.on_trial = replica
                return not (isinstance(result, CommandReport) and result.changes_nothing)
            if isinstance(result, ReplicaLost) or result.broken:
                self._registry.replace_if_registered(replica, error, self._version)
            else:
                self.on_trial = replica
            raise WeightsRefused.of("weights", f"{self._refusal}: {error}")
        if self._replicas:
            for replica, result in self._results.items():
                self._registry.replace_if_registered(replica, str(error_of(result)), self._version)
            reasons = "; ".join(sorted({str(error_of(result)) for result in self._results.values()}))
            raise VersionUntried.of("weights", f"all replicas were lost before that: {reasons}")
        return True

    async def finish(self, on_swapped: OnSwapped | None = None) -> list[ReplicaUpdate]:
        """Lets all replicas use the version; returns the outcome of each, in order.

        Args:
            on_swapped: makes the replicas change one after the other. Called after each with all that have changed.
        """
        first = [replica for replica in (self.on_trial,) if replica is not None]
        others = [each for each in self._replicas if each is not self.on_trial and self._has_succeeded(each)]
        commands = [(each, self._accept) for each in first] + [(each, self._load) for each in others]
        outcomes: dict[RegisteredReplica, ReplicaUpdate] = {}
        for together in [commands] if on_swapped is None else [[command] for command in commands]:
            await self._send_each([replica for replica, _ in together], [command for _, command in together])
            # One that failed is replaced before the next one changes.
            outcomes |= {replica: self._outcome(replica) for replica, _ in together}
            if on_swapped is not None:
                swapped = [each for each, outcome in outcomes.items() if outcome.status == "swapped"]
                await on_swapped(frozenset(each.replica_id for each in swapped))
        return [outcomes.get(replica) or self._outcome(replica) for replica in self._replicas]

    def _outcome(self, replica: RegisteredReplica) -> ReplicaUpdate:
        return self._registry.outcome(replica, self._results[replica], self._version, self._costs[replica])

    def _has_succeeded(self, replica: RegisteredReplica) -> bool:
        """Whether all that was sent to it so far has, if anything was."""
        return replica not in self._results or error_of(self._results[replica]) is None

    async def _try_on(self, replica: RegisteredReplica) -> CommandResult:
        for command in self._trial:
            await self._send_each([replica], [command])
            if not self._has_succeeded(replica):
                break
        return self._results[replica]

    async def _send_each(self, replicas: Sequence[RegisteredReplica], commands: Sequence[Command]) -> None:
        results = await self._registry.send_each(replicas, commands, self._size_bytes)
        for replica, result in zip(replicas, results, strict=True):
            self._results[replica] = result
            if isinstance(result, CommandReport):
                self._costs[replica] += result.costs


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
        is_adapter = info.kind == "adapter"
        async with self._update_lock.lease(f"version {policy.label(info.version)} is being loaded by the replicas"):
            # Once the version is listed, a replica that dies is part of the update, and its outcome says so.
            await self._registry.drop_dead()
            warnings: list[str] = []
            if is_adapter:
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
        return PolicyUpdate(
            version=info.version,
            name=policy.name,
            checksum=info.checksum,
            replicas=replicas,
            canary_s=max((replica.canary_s for replica in replicas), default=0.0),
            keeps_prefix_cache=info.keeps_prefix_cache,
            base=info.base if is_adapter else None,
            warnings=warnings,
        )

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
        update = TwoPhaseUpdate(self._registry, replicas, info.version, payloads, swap)
        try:
            if not await update.try_version():
                warnings += await asyncio.to_thread(self._doubts_about, info)
            policy.versions.make_current(info)
        except Exception:
            if update.on_trial is not None and policy.name is None:
                await self._loading.go_back(update.on_trial, update.on_trial.loaded)
            raise
        if not self._is_rolling or policy.name is not None:
            return await update.finish()

        async def tell(replicas: frozenset[str]) -> None:
            await self._policies.tell_rolling(info.version, replicas)

        return await update.finish(tell)

    def _doubts_about(self, info: Version) -> list[str]:
        """Warnings about a version that changes no log-probability of the canary."""
        if info.kind == "adapter":
            return [NO_EFFECT_OF_ADAPTER]
        before = self._full.desired.full
        is_same = self._full.has_weights(before) and self._full.checksum(before) == info.checksum
        return [] if is_same else [NO_EFFECT]
