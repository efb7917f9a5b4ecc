"""A trainer that pushes new weights all the time, in every way that there is, and some that have to be refused."""

import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.reference_model import State
from rollout_client import AsyncPolicyPusher, AsyncRolloutClient
from rollout_client.contract.policy import PauseMode
from rollout_client.errors import RequestRejected
from tests.endurance.soak.known_weights import KnownWeights
from tests.endurance.soak.version_times import VersionTimes

MODES: dict[PauseMode, int] = {"keep": 8, "wait": 1, "abort": 1}
"""How often each, in proportion."""
REFUSED_SHARE = 0.05
"""Before so many pushes one is made that has to be refused."""
HTTP_UNPROCESSABLE = 422
MOST_KEPT = 4
"""Full weights that the trainer keeps for rollbacks, besides the initial ones; the service keeps fewer."""
UNUSABLE = (torch.nan, torch.finfo(torch.bfloat16).max)


class NotRefused(Exception):
    """The service took weights that nobody can generate with."""


class Trainer:
    """Nobody else pushes. Each run pushes equal weights in equal ways, as long as nothing is refused.

    Args: the service may read checkpoints from `folder`.
    """

    def __init__(self, client: AsyncRolloutClient, weights: KnownWeights, times: VersionTimes, folder: Path) -> None:
        self.refused = 0
        self._client = client
        self._pusher = AsyncPolicyPusher(client)
        self._weights = weights
        self._times = times
        self._folder = folder
        self._draw = random.Random(0)
        self.state: State = weights.initial
        """The current weights, with the current adapter merged into them."""
        self._full: dict[int, State] = {0: weights.initial}
        """The full weights that the service may still have; the last ones are current."""
        self._ways: dict[Callable[[int], Awaitable[None]], int] = {
            self._push_full: 45,
            self._push_delta: 30,
            self._load_checkpoint: 10,
            self._push_adapter: 8,
            self._roll_back: 7,
        }

    async def push(self) -> None:
        """Pushes the next version.

        Raises:
            NotRefused: the service took weights that it should have refused.
            RolloutError: the push failed.
        """
        version = self._times.newest + 1
        if self._draw.random() < REFUSED_SHARE:
            await self._push_bad(version)
        [way] = self._draw.choices(list(self._ways), list(self._ways.values()))
        self._times.send(version, monotonic())
        await way(version)
        self._times.acknowledge(version, monotonic())

    def _options(self) -> dict[str, Any]:
        [mode] = self._draw.choices(list(MODES), list(MODES.values()))
        return {"mode": mode}

    def _seed(self) -> int:
        return self._draw.randrange(2**31)

    async def _push_full(self, version: int) -> None:
        await self._push_state(version, self._weights.perturbed(self._seed()))

    async def _push_delta(self, version: int) -> None:
        """Full weights, where the pusher did not push the current ones."""
        await self._push_state(version, self._weights.partly_changed(self._current_full, self._seed()))

    async def _push_state(self, version: int, state: State) -> None:
        captured = await self._pusher.capture(state)
        await self._pusher.send(captured, version, **self._options())
        self._now_full(version, state)

    async def _load_checkpoint(self, version: int) -> None:
        state, folder = self._weights.perturbed(self._seed()), self._folder / str(version)
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        await self._client.load_checkpoint(folder, version, **self._options())
        shutil.rmtree(folder)
        self._now_full(version, state)

    async def _push_adapter(self, version: int) -> None:
        folder = self._folder / f"adapter-{version}"
        merged = self._weights.save_adapter(folder, self._current_full, self._seed())
        await self._client.push_weights(folder, version, kind="adapter", **self._options())
        shutil.rmtree(folder)
        self.state = merged

    async def _roll_back(self, version: int) -> None:
        stored = {info.version for info in (await self._client.policy.state()).versions}
        to = self._draw.choice([number for number in self._full if number in stored])
        await self._client.policy.rollback(to, version, **self._options())
        self._now_full(version, self._full[to])

    @property
    def _current_full(self) -> State:
        return self._full[max(self._full)]

    def _now_full(self, version: int, state: State) -> None:
        self.state = self._full[version] = state
        for old in sorted(self._full)[1:-MOST_KEPT]:
            del self._full[old]

    async def _push_bad(self, version: int) -> None:
        self._times.send(version, monotonic())
        try:
            await self._client.push_weights(self._weights.unusable(self._draw.choice(UNUSABLE)), version)
        except RequestRejected as error:
            if error.status != HTTP_UNPROCESSABLE:
                raise
        else:
            raise NotRefused(f"version {version} has weights that are not finite or overflow, and was not refused")
        self._times.refuse(version)
        self.refused += 1
