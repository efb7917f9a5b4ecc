"""The service as rollout worker and weight transfer of TRL's experimental `AsyncGRPOTrainer` (1.16).

    transfer = ServiceWeightTransfer(client)
    worker = ServiceRolloutWorker(AsyncRolloutClient(url), dataset, args, weight_transfer=transfer, task_name="math")
    trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=worker, weight_transfer=transfer)

Rewards are the environments' own, so the trainer's reward functions are not called. `args.token_budget` must be given
(0 for batches of a fixed count): unset, the trainer asks a vLLM server for it. Needs the extra `trl`.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from multiprocessing.queues import Queue as ProcessQueue
from typing import Any, Unpack

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollout_client.client import AsyncRolloutClient, RolloutClient
from rollout_client.contract import JsonObject, SampleResult
from rollout_client.errors import RolloutError
from rollout_client.trainers.prompts import RowReader, messages_of
from rollout_client.trainers.rows import (
    NO_VERSION,
    RolloutsNotFinal,
    TokenRow,
    final_reward,
    group_relative_advantages,
    sample_std,
    token_row,
)
from rollout_client.trainers.trl import TrainerOptions, rollout_options

MOST_LOST_GROUPS = 16
"""Groups in a row without one final reward after which the worker gives up."""
BEAT_S = 1.0
POLL_S = 0.02
STOP_S = 15.0
Metrics = dict[str, float]


class WorkerFailed(RolloutError):
    """The rollout worker ended, or does not answer any more."""


class ServiceWeightTransfer:
    """Brings the trainer's weights to the service over HTTP; the service pauses and resumes its engines by itself."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.version: int | None = None
        """What the service calls the weights that came last."""

    def init_weight_transfer(self) -> None:
        self._client.wait_until_ready()

    def pause(self) -> None:
        """Nothing to do: a push pauses each replica only while it swaps."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns once every replica serves them. Holds them all in memory meanwhile, outside the accelerator."""
        self.version = self._client.push_weights({name: tensor.cpu() for name, tensor in iterator}).version

    def resume(self) -> None:
        """Nothing to do: see `pause`."""

    def destroy(self) -> None:
        """Nothing to release: the client is the caller's."""


class ServiceRolloutWorker:
    """Keeps the service busy with the dataset, group by group, over and over, on a thread of its own.

    As many rollouts run ahead of the trainer, under way and waiting in `rollout_buffer` together, as
    `max_inflight_tasks` and `queue_maxsize` of `args` allow. Those that failed or were cut off are in no statistic of
    their group and not put into the buffer; nor are those whose oldest token is more than `max_staleness` versions old.

    Args:
        client: belongs to the worker, which closes it.
        dataset: rows with a column `prompt` of chat messages, and see `RowReader`.
        args: the trainer's `AsyncGRPOConfig`: group size, sampling and limits, with what the trainer fills in.
        weight_transfer: the trainer's. With it each sample's `model_version` is that of its oldest token, otherwise the
            version that was current when its rollout began.
        scale_rewards: whether advantages are divided by the standard deviation of their group.
        task_name, env_columns: see `RowReader`.
        options: what `args` leaves open.
    """

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
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] | ProcessQueue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] | ProcessQueue[Any] = queue.Queue()
        self.model_version = 0
        self._client = client
        self._dataset = dataset
        self._args = args
        self._transfer = weight_transfer
        self._scale_rewards = scale_rewards
        self._reader = RowReader(task_name, env_columns)
        self._options = options
        self._model_versions: dict[int, int] = {}
        self._under_way = 0
        self._lost_groups = 0
        self._beaten_at = time.monotonic()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Future[None] | None = None

    # What the trainer calls

    def start(self) -> None:
        if self._thread is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-service-worker", daemon=True)
        self._thread.start()
        self._outcome = asyncio.run_coroutine_threadsafe(self._work(), self._loop)

    def stop(self) -> None:
        """Cancels what is under way, at the service too, and returns once the thread has ended."""
        if self._loop is None or self._thread is None or self._outcome is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        wait([self._outcome], timeout=STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Rollouts that begin from now on demand the weights that were sent last."""
        if self._transfer is not None and self._transfer.version is not None:
            self._model_versions[self._transfer.version] = model_version
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises `WorkerFailed` if the worker has ended, or has not answered for `stale_after_s` seconds."""
        if self._outcome is not None and self._outcome.done():
            cause = first_of(self._outcome.exception())
            raise WorkerFailed(f"The rollout worker has ended: {cause or 'it was stopped'}") from cause
        age_s = time.monotonic() - self._beaten_at
        if self._outcome is not None and age_s > stale_after_s:
            raise WorkerFailed(
                f"The rollout worker has not answered for {age_s:.0f} s; {stale_after_s:.0f} s are allowed."
            )

    # Its own thread

    async def _work(self) -> None:
        async with self._client, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._beat()), tasks.create_task(self._keep_busy())]
            await self._stopping.wait()
            for task in running:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            self._beaten_at = time.monotonic()
            await asyncio.sleep(BEAT_S)

    async def _keep_busy(self) -> None:
        async with asyncio.TaskGroup() as groups:
            for group_id, row in enumerate(itertools.chain.from_iterable(itertools.repeat(self._dataset))):
                while not self._has_room():
                    await asyncio.sleep(POLL_S)
                self._under_way += self._args.num_generations
                groups.create_task(self._play(group_id, row))

    def _has_room(self) -> bool:
        """Whether one more group may run ahead of the trainer; one always may."""
        limits = [limit for limit in (self._args.max_inflight_tasks, self._args.queue_maxsize) if limit > 0]
        ahead = self.rollout_buffer.qsize() + self._under_way
        return ahead == 0 or ahead + self._args.num_generations <= min(limits, default=2 * self._args.num_generations)

    async def _play(self, group_id: int, row: Mapping[str, Any]) -> None:
        model_version, began_at = self.model_version, time.monotonic()
        options = rollout_options(self._args, self._options)
        options["num_generations"] = self._args.num_generations
        if self._transfer is not None and self._transfer.version is not None:
            options["policy"] = {"min_version": self._transfer.version}
        sample: JsonObject = {**self._reader.fields(row), "messages": list(messages_of(row["prompt"]))}
        try:
            response = await self._client.rollout([sample], **options)
            metrics = self._deliver(group_id, row, response.samples, model_version)
        finally:
            self._under_way -= self._args.num_generations
        self.metrics_queue.put({"rollout/duration_s": time.monotonic() - began_at, **metrics})

    def _deliver(
        self, group_id: int, row: Mapping[str, Any], samples: Sequence[SampleResult], model_version: int
    ) -> Metrics:
        """Puts those of one group that can be trained on into the buffer, and returns how many could not."""
        rewards = [final_reward(sample) for sample in samples]
        self._note_loss(samples, rewards)
        advantages = group_relative_advantages(rewards, [group_id] * len(rewards), scale_rewards=self._scale_rewards)
        reward_std = std_of(rewards)
        stale = 0
        for sample, reward, advantage in zip(samples, rewards, advantages, strict=True):
            tokens = token_row(sample).without_tail()
            if reward is None or not any(tokens.loss_mask):
                continue
            oldest = self._oldest_version(tokens, model_version)
            if self.model_version - oldest > self._args.max_staleness:
                stale += 1
                continue
            metrics = {"reward": reward, "reward_std": reward_std} | named(sample.rewards)
            self.rollout_buffer.put(rollout_sample(row, sample, tokens, advantage, oldest, group_id, metrics))
        return {"rollout/not_final_total": float(rewards.count(None)), "sample/dropped_stale_total": float(stale)}

    def _note_loss(self, samples: Sequence[SampleResult], rewards: Sequence[float | None]) -> None:
        """Raises `RolloutsNotFinal` when too many groups in a row are lost."""
        self._lost_groups = 0 if any(reward is not None for reward in rewards) else self._lost_groups + 1
        if self._lost_groups >= MOST_LOST_GROUPS:
            raise RolloutsNotFinal(samples, len(samples))

    def _oldest_version(self, tokens: TokenRow, model_version: int) -> int:
        """What the trainer calls the weights of the oldest token; `model_version` where that is not known."""
        known = [version for version in tokens.weight_versions if version != NO_VERSION]
        return self._model_versions.get(min(known), model_version) if known else model_version


def rollout_sample(
    row: Mapping[str, Any],
    sample: SampleResult,
    tokens: TokenRow,
    advantage: float,
    model_version: int,
    group_id: int,
    metrics: Metrics,
) -> RolloutSample:
    return RolloutSample(
        prompt=row["prompt"],
        completion=completion_of(sample),
        input_ids=np.asarray(tokens.token_ids, dtype=np.int64),
        completion_mask=np.asarray(tokens.loss_mask, dtype=np.int64),
        old_log_probs=np.asarray(tokens.generation_logprobs, dtype=np.float32),
        advantage=advantage,
        model_version=model_version,
        group_id=group_id,
        metrics=metrics,
        enqueued_at=time.time(),
    )


def completion_of(sample: SampleResult) -> list[dict[str, str]]:
    """The messages from the first generated one on."""
    log = itertools.dropwhile(lambda message: message.generation_logprobs is None, sample.message_log)
    return [{"role": message.role, "content": message.content} for message in log]


def named(rewards: Mapping[str, float]) -> Metrics:
    return {f"rewards/{name}": reward for name, reward in rewards.items()}


def std_of(rewards: Sequence[float | None]) -> float:
    final = [reward for reward in rewards if reward is not None]
    return sample_std(final, sum(final) / len(final)) if final else float("nan")


def first_of(error: BaseException | None) -> BaseException | None:
    """The first error that is not a group of others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
