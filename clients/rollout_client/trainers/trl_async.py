"""The service as rollout worker and weight transfer of TRL's experimental `AsyncGRPOTrainer` (1.16). Needs `trl`.

    transfer = ServiceWeightTransfer(client)
    worker = ServiceRolloutWorker(AsyncRolloutClient(url), dataset, args, weight_transfer=transfer, task_name="math")
    trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=worker, weight_transfer=transfer)

The rewards are those of the environments; the trainer's reward functions are not called. Set `args.token_budget` (0 for
batches of a fixed number of samples): without it, the trainer asks a vLLM server for it.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Unpack

import numpy as np
import torch
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.calls.sync_client.pusher import PolicyPusher
from rollout_client.contract.messages import JsonObject
from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import RolloutError
from rollout_client.results import (
    UNKNOWN_VERSION,
    RolloutsNotFinal,
    TokenRow,
    final_reward,
    group_relative_advantages,
    sample_std,
    token_row,
)
from rollout_client.trainers.dataset_rows import RowReader, messages_of
from rollout_client.trainers.trl import TrainerOptions, rollout_options


class ServiceWeightTransfer(WeightTransferProtocol):
    """Pushes the trainer's weights to the service, which pauses and resumes its engines itself.

    TRL sends no frozen parameters: the service has them.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._pusher: PolicyPusher | None = None
        self.version: int | None = None
        """The service's version of the weights that were sent last; `None` before the first."""

    def init_weight_transfer(self) -> None:
        self._client.wait_until_ready()

    def pause(self) -> None:
        """Does nothing: a push pauses each replica only while it swaps its weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns once every replica serves the weights. Keeps a copy of them in host memory, and needs another one."""
        tensors = {name: tensor.cpu() for name, tensor in iterator}
        if self._pusher is None:
            is_partial = not self._client.policy.layout().tensors.keys() <= tensors.keys()
            self._pusher = PolicyPusher(self._client, is_partial=is_partial)
        self.version = self._pusher.push(tensors).version

    def resume(self) -> None:
        """Does nothing: see `pause`."""

    def destroy(self) -> None:
        """Does nothing: the caller owns the client."""


MAX_LOST_GROUPS = 16
"""The worker fails after this many groups in succession without one final reward."""
FIRST_ROW = "dataset_start_index"
"""Key under which TRL's trainer reads a worker's position for a checkpoint, and writes it before a resumed training."""
HEARTBEAT_S = 1.0
ROOM_POLL_S = 0.02
STOP_TIMEOUT_S = 15.0


class WorkerFailed(RolloutError):
    """The rollout worker has ended, or its event loop no longer responds."""


class DatasetPosition(dict[str, int]):
    """Under `FIRST_ROW` the row with which a resumed training has to begin: the first whose group the trainer lacks.

    A group is done when the trainer has taken all of its samples, or when it has none: all of its rollouts failed or
    were stale. TRL's own count, of the groups that it has trained on, would end before the first group without samples.
    """

    def __init__(self, buffer: "queue.Queue[RolloutSample]") -> None:
        super().__init__({FIRST_ROW: 0})
        self.playing: set[int] = set()
        """Groups whose rollouts have not all ended, or are not in the buffer yet; numbered in the order of rows."""
        self.begun = 0
        """Groups that have begun."""
        self._buffer = buffer

    def __getitem__(self, name: str) -> int:
        # In this order: a group enters the buffer before it leaves `playing`.
        playing = [*self.playing]
        with self._buffer.mutex:
            # TRL adds the lowest number that is not a `group_id` it has trained on: they begin with 1, so it adds 0.
            waiting = [sample.group_id - 1 for sample in self._buffer.queue]
        return super().__getitem__(name) + min([*playing, *waiting], default=self.begun)


class ServiceRolloutWorker(AsyncRolloutWorker):
    """Plays the rows of the dataset in order and over again, one group per row, on a thread of its own.

    The service cuts off rollouts whose oldest token is more than `max_staleness` (of `args`) versions old.

    At most `max_inflight_tasks` and at most `queue_maxsize` rollouts (both of `args`) run ahead of the trainer; those
    in progress and those in `rollout_buffer` count together.

    A training that resumes from a checkpoint continues with the first row whose group the trainer had not taken; its
    epochs end where they would have ended. TRL saves and restores this only for its own class, so this is a subclass,
    but uses nothing else of it. A streamed dataset restarts, as with TRL's worker.

    Args:
        client: the worker owns it and closes it.
        dataset: rows with a column `prompt` of chat messages; `RowReader` reads the other columns.
        args: the trainer's `AsyncGRPOConfig`, after the trainer has filled in its defaults.
        weight_transfer: the trainer's. With it, the `model_version` of a sample is that of its oldest token; without
            it, the version that was current when its rollout began.
        scale_rewards: divide advantages by the standard deviation of their group.
        task_name, env_columns: see `RowReader`.
        tokenizer: the trainer's. With it, the worker fails with `TokenizerDiffers` before its first rollout if it makes
            other tokens than the service's.
        options: fields of the request that `args` does not set.
    """

    model_version = 0

    def __init__(
        self,
        client: AsyncRolloutClient,
        dataset: Any,
        args: Any,
        *,
        weight_transfer: ServiceWeightTransfer | None = None,
        scale_rewards: bool = True,
        task_name: str | None = None,
        env_columns: Sequence[str] = (),
        tokenizer: Any = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self._position = DatasetPosition(self.rollout_buffer)
        # TRL's trainer asks for it by this name.
        self._loop_kwargs: dict[str, Any] = self._position
        self.metrics_queue: Any = queue.Queue()
        self._client = client
        self._dataset = dataset
        self._args = args
        self._transfer = weight_transfer
        self._scale_rewards = scale_rewards
        self._reader = RowReader(task_name, env_columns)
        self._tokenizer = tokenizer
        self._options = options
        self._model_versions: dict[int, int] = {}
        self._in_progress = 0
        self._lost_groups = 0
        self._heartbeat_at = time.monotonic()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Future[None] | None = None

    # Called by the trainer

    def start(self) -> None:
        """Starts the thread; does nothing if it runs already."""
        if self._thread is not None:
            return
        self._position.begun = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-service-worker", daemon=True)
        self._thread.start()
        self._outcome = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def stop(self) -> None:
        """Cancels all rollouts in progress, also at the service, and returns once the thread has ended."""
        if self._loop is None or self._thread is None or self._outcome is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        wait([self._outcome], timeout=STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Rollouts that begin after this call require the weights that were sent last."""
        if self._transfer is not None and self._transfer.version is not None:
            self._model_versions[self._transfer.version] = model_version
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises `WorkerFailed` if the worker has ended, or its event loop was blocked for over `stale_after_s`."""
        if self._outcome is not None and self._outcome.done():
            cause = self._outcome.exception()
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise WorkerFailed(f"The rollout worker has ended: {cause or 'it was stopped'}") from cause
        age_s = time.monotonic() - self._heartbeat_at
        if self._outcome is not None and age_s > stale_after_s:
            raise WorkerFailed(
                f"The rollout worker has not answered for {age_s:.0f} s; {stale_after_s:.0f} s are allowed."
            )

    # On the worker's own thread

    async def _run(self) -> None:
        async with self._client, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._beat()), tasks.create_task(self._play_dataset())]
            await self._stopping.wait()
            for task in running:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            self._heartbeat_at = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)

    async def _play_dataset(self) -> None:
        if self._tokenizer is not None:
            await self._client.check_tokenizer(self._tokenizer)
        async with asyncio.TaskGroup() as groups:
            for group, row in enumerate(rows_from(self._dataset, self._loop_kwargs[FIRST_ROW])):
                # The trainer takes samples from the buffer on its own thread, and its queue has no event for it.
                while not self._has_room():
                    await asyncio.sleep(ROOM_POLL_S)
                self._in_progress += self._args.num_generations
                self._position.playing.add(group)
                self._position.begun = group + 1
                groups.create_task(self._play_group(group, row))

    def _has_room(self) -> bool:
        """Whether another group may run ahead of the trainer; one group always may."""
        limits = [limit for limit in (self._args.max_inflight_tasks, self._args.queue_maxsize) if limit > 0]
        ahead: int = self.rollout_buffer.qsize() + self._in_progress
        return ahead == 0 or ahead + self._args.num_generations <= min(limits, default=2 * self._args.num_generations)

    async def _play_group(self, group: int, row: Mapping[str, Any]) -> None:
        version_at_start, began_at = self.model_version, time.monotonic()
        options = rollout_options(self._args, self._options)
        options["num_generations"] = self._args.num_generations
        if self._transfer is not None and self._transfer.version is not None:
            # The trainer makes one version of its model of each that the service gets.
            demand = {"min_version": self._transfer.version, "max_staleness": self._args.max_staleness}
            options["policy"] = demand
        sample: JsonObject = {**self._reader.fields(row), "messages": list(messages_of(row["prompt"]))}
        try:
            response = await self._client.rollout([sample], **options)
            metrics = self._deliver(group, row, response.samples, version_at_start)
        finally:
            self._in_progress -= self._args.num_generations
        self.metrics_queue.put({"rollout/duration_s": time.monotonic() - began_at, **metrics})

    def _deliver(
        self, group: int, row: Mapping[str, Any], rollouts: Sequence[SampleResult], version_at_start: int
    ) -> dict[str, float]:
        """Puts the rollouts of one group that can be trained on into the buffer, and returns how many were left out.

        Left out are rollouts without a final reward, without a trainable token, and those whose oldest token is more
        than `max_staleness` of the trainer's versions old. Only final rewards enter the group's statistics.
        """
        self._count_lost_groups(rollouts)
        rewards = [final_reward(rollout) for rollout in rollouts]
        advantages = group_relative_advantages(rewards, [group] * len(rewards), scale_rewards=self._scale_rewards)
        final = [reward for reward in rewards if reward is not None]
        reward_std = sample_std(final, sum(final) / max(len(final), 1))
        samples: list[RolloutSample] = []
        stale = cut_off = sum(rollout.status == "stale" for rollout in rollouts)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            tokens = token_row(rollout).without_tail()
            if reward is None or not any(tokens.loss_mask):
                continue
            oldest = self._oldest_version(tokens, version_at_start)
            if self.model_version - oldest > self._args.max_staleness:
                stale += 1
                continue
            named = {f"rewards/{name}": value for name, value in rollout.rewards.items()}
            samples.append(
                RolloutSample(
                    prompt=row["prompt"],
                    completion=_completion_of(rollout),
                    input_ids=np.asarray(tokens.token_ids, dtype=np.int64),
                    completion_mask=np.asarray(tokens.loss_mask, dtype=np.int64),
                    old_log_probs=np.asarray(tokens.generation_logprobs, dtype=np.float32),
                    advantage=advantage,
                    model_version=oldest,
                    group_id=group + 1,
                    metrics={"reward": reward, "reward_std": reward_std, **named},
                    enqueued_at=time.time(),
                )
            )
        for sample in samples:
            self.rollout_buffer.put(sample)
        self._position.playing.discard(group)
        not_final = rewards.count(None) - cut_off
        return {"rollout/not_final_total": float(not_final), "sample/dropped_stale_total": float(stale)}

    def _oldest_version(self, tokens: TokenRow, at_start: int) -> int:
        """The trainer's version that generated the oldest token; `at_start` where it is not known."""
        known = [version for version in tokens.weight_versions if version != UNKNOWN_VERSION]
        return self._model_versions.get(min(known), at_start) if known else at_start

    def _count_lost_groups(self, rollouts: Sequence[SampleResult]) -> None:
        """Raises `RolloutsNotFinal` after `MAX_LOST_GROUPS` groups in succession without one final reward.

        Rollouts that were cut off as stale prove that the service plays.
        """
        plays = any(rollout.status == "stale" or final_reward(rollout) is not None for rollout in rollouts)
        self._lost_groups = 0 if plays else self._lost_groups + 1
        if self._lost_groups >= MAX_LOST_GROUPS:
            raise RolloutsNotFinal(rollouts, len(rollouts))


def _completion_of(rollout: SampleResult) -> list[dict[str, str]]:
    """The messages from the first generated one on."""
    log = itertools.dropwhile(lambda message: message.generation_logprobs is None, rollout.message_log)
    return [{"role": message.role, "content": message.content} for message in log]


def rows_from(dataset: Any, first: int) -> Iterator[Mapping[str, Any]]:
    """The rows in order and over again, from row `first` on; of a streamed dataset only from 0 on."""
    if first:
        yield from (dataset[place] for place in range(first % len(dataset), len(dataset)))
    yield from itertools.chain.from_iterable(itertools.repeat(dataset))
