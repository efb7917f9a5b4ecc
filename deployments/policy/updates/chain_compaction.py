"""Keeps chains of deltas short: the store makes the full weights of the current version in the background when due.

Guarantee: once it has made them, they need no older version, which can then be removed.
"""

import asyncio
import logging
from collections.abc import Callable

from deployments.policy.failures import PolicyFailure
from deployments.policy.versions.version_history import PolicyVersions
from deployments.rpc.background_tasks import BackgroundTasks

LARGEST_SHARE = 0.5
"""Of the size of the full weights: more bytes of deltas behind them would save little disk."""
logger = logging.getLogger("rollout_service.policy")


class ChainCompaction:
    """
    Args:
        longest_chain: how many deltas may follow a file with full weights.
    """

    def __init__(self, versions: PolicyVersions, tasks: BackgroundTasks, longest_chain: int) -> None:
        self._versions = versions
        self._tasks = tasks
        self._longest_chain = longest_chain
        self._is_running = False

    def start_if_due(self, then: Callable[[], None]) -> None:
        """Returns at once; `then` is called when older versions are of no use any more."""
        full = self._versions.desired.full
        if not self._is_running and self._is_due(full):
            self._is_running = True
            self._tasks.start(self._compact(full, then))

    def _is_due(self, version: int) -> bool:
        chains = self._versions.chains
        deltas = len(chains.links(version)) - 1
        if deltas < 1:
            return False
        full_bytes = self._versions.info(version).size_bytes
        return deltas > self._longest_chain or chains.bytes_behind(version) > LARGEST_SHARE * full_bytes

    async def _compact(self, version: int, then: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(self._versions.file, version)
        except (PolicyFailure, OSError) as error:
            extra = {"version": version}
            logger.error("The full weights of version %d could not be made.", version, exc_info=error, extra=extra)
        else:
            then()
        finally:
            self._is_running = False
