"""The named policies that one replica serves: adapters over its full weights, several at a time.

Guarantees: a generation uses an adapter only once the adapter has passed its canary here; what generations
use is replaced at once for all names of a command, or not at all; nothing is paused.
"""

import asyncio
from collections.abc import Awaitable, Callable

from deployments.generation.adapter_folders import adapter_folder
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.canary_timeout import with_timeout
from deployments.policy.replicas.commands import SetAdapters, VersionPayload
from deployments.policy.replicas.node_weights import NodeWeights
from rollout_client.policy_names import label_of


class BaseReplaced(Exception):
    """The replica has other full weights than those that the adapter is for."""


class NamedPolicies:
    """
    Args:
        try_adapter: as `WeightsCanary.try_adapter`.
        full_version: the version of the full weights in the engine.
    """

    def __init__(
        self,
        adapters: Adapters,
        node_weights: NodeWeights,
        try_adapter: Callable[[LoadedAdapter], Awaitable[bool]],
        full_version: Callable[[], int],
    ) -> None:
        self._adapters = adapters
        self._node_weights = node_weights
        self._try_adapter = try_adapter
        self._full_version = full_version

    @property
    def versions(self) -> dict[str, int]:
        """By name, the version that new generations use."""
        return self._adapters.versions

    async def set(self, command: SetAdapters) -> tuple[int, bool]:
        """Carries out the command.

        Returns:
            How many bytes were fetched from other nodes, and whether one of the adapters that were tried for it is so
            small that it changes no log-probability.

        Raises:
            BaseReplaced: an adapter is for other full weights.
            WeightsNotFetched, OSError: its file cannot be had.
            AdapterDoesNotFit, AdapterHasNoEffect: it is not for the model in the engine.
            GenerationNotFinite, GenerationLost: the engine cannot generate with it.
            Exception: what vLLM raises for an adapter that it cannot use.
        """
        fetched_bytes, changes_nothing = 0, False
        named: dict[str, LoadedAdapter] = {}
        for payload in command.payloads:
            adapter, fetched, is_unseen = await self._held(payload, command.canary_timeout_s)
            named[str(payload.name)] = adapter
            fetched_bytes += fetched
            changes_nothing |= is_unseen
        if not command.is_trial:
            self._adapters.serve(named)
        return fetched_bytes, changes_nothing

    async def _held(self, payload: VersionPayload, canary_timeout_s: float) -> tuple[LoadedAdapter, int, bool]:
        if payload.base != self._full_version():
            raise BaseReplaced(
                f"It is an adapter for version {payload.base}, and the replica has version {self._full_version()}."
            )
        label = label_of(payload.name, payload.version)
        if (held := self._adapters.held(label, payload.checksum)) is not None:
            return held, 0, False
        # The same number may have had other weights before, which were refused.
        folder = self._node_weights.own_folder / f"{label.replace('/', '@')}@{payload.checksum}"
        async with self._node_weights.file_to_copy(payload) as file:
            await asyncio.to_thread(adapter_folder, folder, payload, file.path, self._adapters.needed)
        adapter = await self._adapters.load(label, payload.version, folder, payload.checksum)
        self._adapters.hold(adapter)
        try:
            is_unseen = await with_timeout(self._try_adapter(adapter), canary_timeout_s)
        except BaseException:
            self._adapters.give_up(adapter)
            raise
        return adapter, file.fetched_bytes, is_unseen
