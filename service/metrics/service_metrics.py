"""All metrics of one ingress replica."""

import asyncio
from collections.abc import Callable

from deployments.instruments import flush_again_and_again
from service.metrics.gauges import Gauges, Look
from service.metrics.http_metrics import HttpMetrics
from service.metrics.rollout_metrics import RolloutMetrics


class ServiceMetrics:
    def __init__(self) -> None:
        self.rollouts = RolloutMetrics()
        self.http = HttpMetrics()
        self._following: list[asyncio.Task[None]] = []

    def follow(self, look: Callable[[], Look]) -> None:
        """From now on, for the life of the replica, Ray is given what was counted, and what `look` finds."""
        gauges = Gauges(look)
        instruments = (*self.rollouts.instruments, *self.http.instruments, gauges.gap)
        self._following = [
            asyncio.create_task(flush_again_and_again(instruments)),
            asyncio.create_task(gauges.follow()),
        ]
