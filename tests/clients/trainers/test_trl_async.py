"""`ServiceRolloutWorker` against a scripted service: what reaches the buffer, how far it runs ahead, how it ends."""

import json
import queue
import re
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout_client import AsyncRolloutClient
from tests.clients.scripted_service import HUNG_UP_WITHIN_S, REJECTED, Json, ScriptedService, problem
from tests.clients.trainers.scripted_trainer import (
    END,
    LOST,
    ON_PROCESSORS,
    PROMPTS,
    ROWS,
    PushingClient,
    answering,
    layout_of,
    prompt_message,
    trainer_args,
    two_turns,
)
from tests.paths import TINY_MODEL

with warnings.catch_warnings():
    # What TRL warns of on import.
    warnings.simplefilter("ignore")
    from transformers import TrainerCallback

    from rollout_client.trainers.trl_async import (
        FIRST_ROW,
        MAX_LOST_GROUPS,
        DatasetPosition,
        ServiceRolloutWorker,
        ServiceWeightTransfer,
        WorkerFailed,
        rows_from,
    )

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:.*torch.jit.script_method"),
]


def async_args(**changed: Any) -> SimpleNamespace:
    limits: Json = {"num_generations": 2, "max_inflight_tasks": 4, "queue_maxsize": 1024, "max_staleness": 1}
    return trainer_args(**limits | changed)


@contextmanager
def worker(service: ScriptedService, rows: list[Json] = ROWS, args: Any = None, **options: Any) -> Iterator[Any]:
    """Stopped when the block ends; started by the test."""
    made = WatchedWorker(AsyncRolloutClient(service.url), rows, args or async_args(), task_name="math", **options)
    try:
        yield made
    finally:
        made.stop()


def take(rollout_worker: Any, count: int) -> list[Any]:
    return [rollout_worker.rollout_buffer.get(timeout=HUNG_UP_WITHIN_S) for _ in range(count)]


class WatchedWorker(ServiceRolloutWorker):
    """Tells when all its rollouts are in the buffer and it has found no room for another group."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lock = threading.Lock()
        self._is_full = threading.Event()

    def _has_room(self) -> bool:
        with self._lock:
            has_room = super()._has_room()
            if not has_room and not self._in_progress:
                self._is_full.set()
            return has_room

    def take_when_full(self, count: int) -> None:
        """Takes `count` samples; the next call waits until the worker has made up for them."""
        assert self._is_full.wait(HUNG_UP_WITHIN_S)
        with self._lock:
            take(self, count)
            self._is_full.clear()


def test_the_worker_fills_the_buffer_group_by_group(service: ScriptedService) -> None:
    service.rollouts.extend([answering({"rewards": {"sum": 0.0}}, {"rewards": {"sum": 1.0}})] * 2)
    with worker(service, ROWS[:1], async_args(max_inflight_tasks=2)) as rollout_worker:
        rollout_worker.start()
        first, second = take(rollout_worker, 2)
    assert [first.group_id, second.group_id] == [1, 1]
    assert first.prompt == PROMPTS[0]
    assert [message["role"] for message in first.completion] == ["assistant", "environment", "assistant", "environment"]
    assert first.input_ids.tolist() == [258, 10, 87, 261, 30, 31, 20, 21, 32, END]
    assert first.completion_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert first.old_log_probs.tolist() == [0, 0, 0, 0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert (first.input_ids.dtype, first.old_log_probs.dtype) == (np.int64, np.float32)
    deviation = 0.5**0.5
    assert [first.advantage, second.advantage] == pytest.approx([-0.5 / (deviation + 1e-4), 0.5 / (deviation + 1e-4)])
    assert second.metrics == {"reward": 1, "reward_std": pytest.approx(deviation), "rewards/sum": 1}


def test_a_group_is_one_sample_and_the_dataset_is_repeated(service: ScriptedService) -> None:
    service.rollouts.extend([answering()] * 50)
    with worker(service, args=async_args(max_inflight_tasks=2), max_rollout_turns=2) as rollout_worker:
        rollout_worker.start()
        take(rollout_worker, 6)
    assert service.bodies[0] == {
        "samples": [{"task_name": "math", "messages": PROMPTS[0], "extra_env_info": {"ground_truth": "2"}}],
        "num_generations": 2,
        "sampling": {"temperature": 0.75, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "max_new_tokens": 8},
        "max_rollout_turns": 2,
    }
    assert [body["samples"][0]["messages"] for body in service.bodies[:3]] == [PROMPTS[0], PROMPTS[1], PROMPTS[0]]


def test_no_more_runs_ahead_of_the_trainer_than_allowed(service: ScriptedService) -> None:
    service.rollouts.extend([answering()] * 50)
    with worker(service, args=async_args(max_inflight_tasks=5)) as rollout_worker:
        rollout_worker.start()
        rollout_worker.take_when_full(0)
        assert (len(service.bodies), rollout_worker.rollout_buffer.qsize()) == (2, 4)
        rollout_worker.take_when_full(2)
        rollout_worker.take_when_full(0)
        assert (len(service.bodies), rollout_worker.rollout_buffer.qsize()) == (3, 4)


def test_rollouts_without_a_final_reward_or_a_token_are_left_out(service: ScriptedService) -> None:
    empty = {"message_log": [prompt_message()]}
    service.rollouts.extend([answering({}, LOST, {}, empty)] * 50)
    with worker(service, args=async_args(num_generations=4), scale_rewards=False) as rollout_worker:
        rollout_worker.start()
        samples = take(rollout_worker, 2)
        metrics = rollout_worker.metrics_queue.get(timeout=HUNG_UP_WITHIN_S)
    assert [sample.metrics["reward"] for sample in samples] == [0, 2]
    assert [sample.advantage for sample in samples] == pytest.approx([-5 / 3, 1 / 3])
    assert metrics["rollout/not_final_total"] == 1
    assert metrics["sample/dropped_stale_total"] == 0


def test_a_sample_has_the_version_of_its_oldest_token_and_may_be_too_old(
    service: ScriptedService, client: PushingClient
) -> None:
    transfer = ServiceWeightTransfer(client)
    client.layout = layout_of({"w": torch.zeros(1)})
    with worker(service, args=async_args(max_inflight_tasks=2), weight_transfer=transfer) as rollout_worker:
        for model_version in (1, 2, 3):
            transfer.send_weights(iter([("w", torch.full((1,), float(model_version)))]))
            rollout_worker.update_model_version(model_version)
        mixed = {"message_log": two_turns(version=102, newer=103)}
        stale = {"message_log": two_turns(version=101, newer=103)}
        service.rollouts.extend([answering(mixed, stale)] * 50)
        rollout_worker.start()
        [sample, _] = take(rollout_worker, 2)
        metrics = rollout_worker.metrics_queue.get(timeout=HUNG_UP_WITHIN_S)
    assert sample.model_version == 2
    assert metrics["sample/dropped_stale_total"] == 1
    assert service.bodies[0]["policy"] == {"min_version": 103, "max_staleness": 1}
    assert (client.kinds, [pushed["w"].item() for pushed in client.pushed]) == (["full", "delta", "delta"], [1, 2, 3])


def test_parameters_that_the_trainer_does_not_send_stay_as_they_are() -> None:
    client = PushingClient("http://127.0.0.1:1")
    client.layout = layout_of({"frozen": torch.zeros(1), "trained": torch.zeros(8)})
    transfer = ServiceWeightTransfer(client)
    for value in (1.0, 2.0):
        trained = torch.zeros(8)
        trained[3] = value
        transfer.send_weights(iter([("trained", trained)]))
    assert client.kinds[0] == "partial"
    assert [pushed["trained"][3].item() for pushed in client.pushed] == [1.0, 2.0]
    assert all(list(pushed) == ["trained"] for pushed in client.pushed)


def test_rollouts_that_were_cut_off_as_stale_count_as_dropped(service: ScriptedService) -> None:
    cut_off = {"status": "stale"}
    groups = MAX_LOST_GROUPS + 1
    service.rollouts.extend([answering(cut_off, cut_off)] * groups + [answering({}, cut_off)] * 50)
    with worker(service, args=async_args(max_inflight_tasks=2)) as rollout_worker:
        rollout_worker.start()
        take(rollout_worker, 1)
        metrics = [rollout_worker.metrics_queue.get(timeout=HUNG_UP_WITHIN_S) for _ in range(groups + 1)]
    assert [each["sample/dropped_stale_total"] for each in metrics] == [2.0] * groups + [1.0]
    assert {each["rollout/not_final_total"] for each in metrics} == {0.0}


def failure_of(rollout_worker: Any) -> str:
    """Why the worker has ended, once it has."""
    ended_by = time.monotonic() + HUNG_UP_WITHIN_S
    while time.monotonic() < ended_by:
        try:
            rollout_worker.check_health(300)
        except WorkerFailed as failed:
            return str(failed)
        time.sleep(0.01)
    raise AssertionError("The worker still runs.")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda _: problem(REJECTED), r"has ended: The request is not valid.*no task 'maths'"),
        (answering(LOST), "2 of 2 rollouts have no final reward; idx 0 of task math"),
    ],
    ids=["refused", "all groups lost"],
)
def test_a_worker_that_has_ended_says_why(service: ScriptedService, answer: Any, reason: str) -> None:
    service.rollouts.extend([answer] * 50)
    with worker(service) as rollout_worker:
        rollout_worker.check_health(1)
        rollout_worker.start()
        assert re.search(reason, failure_of(rollout_worker))


def test_a_worker_that_does_not_answer_is_noticed(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging())
    with worker(service, args=async_args(max_inflight_tasks=2)) as rollout_worker:
        rollout_worker.start()
        rollout_worker.check_health(60)
        with pytest.raises(WorkerFailed, match=r"has not answered for \d+ s; -1 s are allowed"):
            rollout_worker.check_health(-1)


def test_stopping_cancels_what_is_under_way_at_the_service(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging())
    with worker(service, args=async_args(max_inflight_tasks=2)) as rollout_worker:
        rollout_worker.start()
        assert service.hangs.wait(HUNG_UP_WITHIN_S)
        rollout_worker.stop()
        assert service.hung_up.wait(HUNG_UP_WITHIN_S)
        rollout_worker.stop()
        with pytest.raises(queue.Empty):
            rollout_worker.rollout_buffer.get_nowait()


# Where a resumed training begins


def test_the_position_is_the_first_row_whose_group_is_missing() -> None:
    buffer: Any = queue.Queue()
    position = DatasetPosition(buffer)
    position[FIRST_ROW] = 5
    assert position[FIRST_ROW] == 5
    position.playing, position.begun = {0, 1, 2}, 3
    position.playing.discard(0)
    assert position[FIRST_ROW] == 6, "group 0 came to nothing"
    for group in (2, 1, 1):
        buffer.put(SimpleNamespace(group_id=group + 1))
        position.playing.discard(group)
    assert [(position[FIRST_ROW], buffer.get().group_id)[0] for _ in range(3)] == [6, 6, 6]
    assert position[FIRST_ROW] == 8


def test_rows_go_on_from_a_position_in_any_round_over_the_dataset() -> None:
    for start, rows in ((0, "abcab"), (2, "cabca"), (7, "bcabc")):
        assert [*islice(rows_from("abc", start), 5)] == [*rows]


def attention(
    query: Any, key: Any, value: Any, queries: Any, keys: Any, *_lengths: int, softmax_scale: float, **_options: Any
) -> torch.Tensor:
    """What tree attention calls of its CUDA kernel, written out: each segment attends to its own path, causally."""
    attended = []
    for (start, end), (first, last) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        before = (last - first) - (end - start)
        unseen = ~torch.ones(end - start, last - first, dtype=torch.bool).tril(before)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[first:last]) * softmax_scale
        shares = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        attended.append(torch.einsum("hqk,khd->qhd", shares, value[first:last]))
    return torch.cat(attended)


def numbered_rows(count: int) -> list[Json]:
    return [{**ROWS[0], "prompt": [{"role": "user", "content": f"Question {number}"}]} for number in range(count)]


def question(body: Json) -> int:
    return int(body["samples"][0]["messages"][0]["content"].removeprefix("Question "))


@pytest.fixture
def _on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainer without a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.mark.usefixtures("_on_processors")
def test_async_grpo_trains_and_resumes_with_the_first_row_it_has_not_had(
    service: ScriptedService, client: PushingClient, tmp_path: Path
) -> None:
    rows = numbered_rows(8)
    lost_row = 1

    def train(stops_after: int, **options: Any) -> Any:
        service.bodies.clear()
        service.rollouts.clear()
        service.rollouts.extend([lambda body: answering(LOST if question(body) == lost_row else {})(body)] * 500)
        grpo = async_grpo(service, client, rows, tmp_path, num_train_epochs=1, save_steps=3)
        grpo.add_callback(StopAfter(stops_after))
        grpo.train(**options)
        return grpo

    grpo = train(3)
    assert service.bodies[0]["policy"] == {"min_version": 101, "max_staleness": grpo.args.max_staleness}
    assert grpo.state.log_history[0]["reward"] == 0.5
    assert grpo.state.log_history[0]["grad_norm"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(client.pushed[0][name], client.pushed[-1][name])
    checkpoint = tmp_path / "checkpoint-3"
    # Of eight rows: 0, 2 and 3 are trained on, nothing came of 1, and 4 is in the batch that the trainer has fetched.
    assert json.loads((checkpoint / "rollout_state.json").read_text())["prompt_index"] == 5
    grpo = train(100, resume_from_checkpoint=str(checkpoint))
    assert {question(body) for body in service.bodies[:4]} == {5, 6, 7, 0}
    # The epoch ends with its eighth row; TRL counts the row that it has fetched for the next step.
    assert grpo.state.global_step == 5


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if state.global_step >= self._step:
            control.should_training_stop = True


def async_grpo(service: ScriptedService, client: PushingClient, rows: list[Json], folder: Path, **changed: Any) -> Any:
    """TRL's own trainer of the tiny model, with the worker; a step takes one group."""
    from datasets import Dataset
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    dataset = Dataset.from_list(rows)
    options: Json = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_inflight_tasks": 2}
    args = AsyncGRPOConfig(output_dir=str(folder), token_budget=0, **ON_PROCESSORS, **options, **changed)
    transfer = ServiceWeightTransfer(client)
    client.layout = layout_of(load_file(TINY_MODEL / "model.safetensors"))
    rollout_worker = ServiceRolloutWorker(
        AsyncRolloutClient(service.url), dataset, args, weight_transfer=transfer, task_name="math"
    )
    return AsyncGRPOTrainer(
        str(TINY_MODEL), args=args, train_dataset=dataset, rollout_worker=rollout_worker, weight_transfer=transfer
    )
