"""TRL's trainers against a scripted service: what they send, what they train on, which weights they ask for."""

import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fastapi.responses import JSONResponse

from rollout_client import AsyncRolloutClient, RolloutClient, Sampling
from rollout_client.errors import ServiceUnreachable
from rollout_client.policy_contract import PolicyUpdate
from rollout_client.trainers import weights
from rollout_client.trainers.prompts import RowReader, fields_by_prompt
from rollout_client.trainers.trl import ServiceRolloutFunc, service_reward
from tests.clients.scripted_service import REJECTED, SUMMARY, Json, ScriptedService, problem, result, running
from tests.paths import TINY_MODEL

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:.*torch.jit.script_method")

END = 261
ROWS: list[Json] = [
    {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "extra_env_info": {"ground_truth": "2"}},
    {"prompt": [{"role": "user", "content": "What is 1 + 2?"}], "extra_env_info": {"ground_truth": "3"}},
]
PROMPTS = [row["prompt"] for row in ROWS]
LOST: Json = {
    "status": "error",
    "total_reward": None,
    "error": {"kind": "timeout", "message": "Slow.", "retryable": True},
}


class PushingClient(RolloutClient):
    """Takes weights and keeps a copy of each push in place of sending them."""

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self.pushed: list[dict[str, torch.Tensor]] = []
        self.failure: Exception | None = None

    def push_weights(self, source: Any, version: int | None = None, **options: Any) -> PolicyUpdate:
        if self.failure is not None:
            raise self.failure
        tensors = source.state_dict() if isinstance(source, torch.nn.Module) else source
        self.pushed.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
        return PolicyUpdate(version=100 + len(self.pushed), checksum=None, replicas=[])


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running(ScriptedService()) as scripted:
        yield scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[PushingClient]:
    with PushingClient(service.url) as pushing_client:
        yield pushing_client


def prompt_message(content: str = "") -> Json:
    return {"role": "user", "content": content, "token_ids": [258, 10, 87, 261]}


def response_message(*token_ids: int, version: int = 0) -> Json:
    return {
        "role": "assistant",
        "content": "said",
        "token_ids": list(token_ids),
        "generation_logprobs": [-0.5] * len(token_ids),
        "weight_versions": [{"version": str(version), "start": 0, "end": len(token_ids)}],
    }


def two_turns(version: int = 0, newer: int | None = None) -> list[Json]:
    feedback = {"role": "environment", "content": "no", "token_ids": [20, 21]}
    last = response_message(32, END, version=version if newer is None else newer)
    return [prompt_message(), response_message(30, 31, version=version), feedback, last, feedback]


def answering(*fields: Json, log: list[Json] | None = None) -> Callable[[Json], JSONResponse]:
    """Every rollout has two turns and the next of `fields`, over and over; its rewards count up from 0."""

    def answer(body: Json) -> JSONResponse:
        generations = body.get("num_generations", 1)
        version = body.get("policy", {}).get("min_version", 0)
        samples = []
        for place in range(len(body["samples"]) * generations):
            said: Json = {"message_log": log or two_turns(version), "total_reward": float(place), "answer": str(place)}
            said |= fields[place % len(fields)] if fields else {}
            samples.append(result(place // generations, place % generations, **said))
        return JSONResponse({**SUMMARY, "samples": samples})

    return answer


def trainer_args(**changed: Any) -> SimpleNamespace:
    said: Json = {
        "temperature": 0.75,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": None,
        "max_completion_length": 8,
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
        "chat_template_kwargs": None,
    }
    return SimpleNamespace(**said | changed)


class OneProcess:
    """What the adapter asks of accelerate, in a trainer that runs alone."""

    is_main_process = True
    distributed_type = "NO"

    def unwrap_model(self, model: Any) -> Any:
        return model


def trainer(rows: Any = None, **args: Any) -> SimpleNamespace:
    def tokenizer(text: str) -> Json:
        return {"input_ids": [ord(letter) for letter in text]}

    processing_class = cast(Any, tokenizer)
    processing_class.pad_token_id = 256
    return SimpleNamespace(
        args=trainer_args(**args),
        processing_class=processing_class,
        model=torch.nn.Linear(1, 1),
        train_dataset=ROWS if rows is None else rows,
        eval_dataset=None,
        state=SimpleNamespace(global_step=0),
        accelerator=OneProcess(),
    )


# The rollout function: what is posted


def test_each_prompt_is_posted_as_a_sample_of_its_row_with_the_sampling_of_the_trainer(
    service: ScriptedService, client: PushingClient
) -> None:
    rollout_func = ServiceRolloutFunc(client, task_name="math", max_rollout_turns=3, max_seq_len=64)
    rollout_func([PROMPTS[1], PROMPTS[1], PROMPTS[0]], trainer(chat_template_kwargs={"enable_thinking": False}))
    info = [row["extra_env_info"] for row in ROWS]
    assert service.bodies == [
        {
            "samples": [
                {"idx": 0, "task_name": "math", "messages": PROMPTS[1], "extra_env_info": info[1]},
                {"idx": 1, "task_name": "math", "messages": PROMPTS[1], "extra_env_info": info[1]},
                {"idx": 2, "task_name": "math", "messages": PROMPTS[0], "extra_env_info": info[0]},
            ],
            "sampling": {"temperature": 0.75, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "max_new_tokens": 8},
            "chat_template_kwargs": {"enable_thinking": False},
            "max_rollout_turns": 3,
            "max_seq_len": 64,
            "policy": {"min_version": 101},
        }
    ]


def test_sampling_that_is_given_comes_before_that_of_the_trainer(
    service: ScriptedService, client: PushingClient
) -> None:
    rollout_func = ServiceRolloutFunc(client, task_name="math", sampling=Sampling(temperature=0.5, stop_strings=["x"]))
    rollout_func(PROMPTS, trainer(min_p=0.125))
    assert service.bodies[0]["sampling"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.125,
        "max_new_tokens": 8,
        "stop_strings": ["x"],
    }


def test_a_prompt_of_text_is_tokenized_by_the_tokenizer_of_the_trainer(
    service: ScriptedService, client: PushingClient
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "task_name": "sums"}]
    ServiceRolloutFunc(client, env_columns=["answer"])(["1+1="], trainer(rows))
    message = {"role": "user", "content": "1+1=", "token_ids": [49, 43, 49, 61]}
    [posted] = service.bodies[0]["samples"]
    assert posted == {"idx": 0, "task_name": "sums", "extra_env_info": {"answer": "2"}, "message_log": [message]}


def test_a_function_can_say_what_belongs_to_a_prompt(service: ScriptedService, client: PushingClient) -> None:
    def fields_of(prompt: Any) -> Mapping[str, Any]:
        return {"task_name": "echo", "extra_env_info": {"word": prompt[0]["content"]}}

    ServiceRolloutFunc(client, fields_of=fields_of)([[{"role": "user", "content": "hi"}]], trainer(iter(())))
    assert service.bodies[0]["samples"][0]["extra_env_info"] == {"word": "hi"}


def test_evaluation_finds_its_prompts_in_its_own_datasets(service: ScriptedService, client: PushingClient) -> None:
    evaluating = trainer([])
    evaluating.model.eval()
    evaluating.eval_dataset = {"easy": ROWS[:1], "hard": ROWS[1:]}
    ServiceRolloutFunc(client, task_name="math")([PROMPTS[1]], evaluating)
    assert service.bodies[0]["samples"][0]["extra_env_info"] == {"ground_truth": "3"}


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        (ROWS[1:], {}, "A prompt of the trainer is not in its dataset"),
        (iter(ROWS), {}, "The dataset is streamed"),
        (ROWS, {"repetition_penalty": 1.5}, "no repetition penalty, and repetition_penalty is 1.5"),
        (ROWS, {"generation_kwargs": {"typical_p": 0.5}}, "knows no generation_kwargs"),
        ([*ROWS, {**ROWS[0], "extra_env_info": {}}], {}, "Two rows of the dataset have the same prompt and differ"),
    ],
)
def test_what_cannot_be_played_as_the_trainer_means_it_is_a_value_error(
    service: ScriptedService, client: PushingClient, rows: Any, args: Json, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ServiceRolloutFunc(client, task_name="math")(PROMPTS[:1], trainer(rows, **args))
    assert service.bodies == []


# Rows of a dataset


def test_a_row_becomes_what_a_sample_has_beside_its_prompt() -> None:
    row = {
        "prompt": "x",
        "task_name": "a",
        "extra_env_info": '{"n": 1}',
        "tools": None,
        "stop_strings": ["."],
        "level": 3,
    }
    assert RowReader("b").fields(row) == {"task_name": "a", "extra_env_info": {"n": 1}, "stop_strings": ["."]}
    assert RowReader("b", ["level"]).fields({"prompt": "x", "level": 3}) == {
        "task_name": "b",
        "extra_env_info": {"level": 3},
    }


def test_a_row_that_says_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="has no column task_name"):
        RowReader().fields({"prompt": "x"})
    with pytest.raises(ValueError, match="has no column level; it has prompt, n"):
        RowReader("a", ["level"]).fields({"prompt": "x", "n": 1})


def test_prompts_are_equal_whatever_null_fields_a_dataset_filled_in() -> None:
    filled = [{**PROMPTS[0][0], "name": None}]
    found = fields_by_prompt([{"prompt": filled, "extra_env_info": {}}, {"prompt": PROMPTS[0]}], RowReader("a"))
    assert list(found) == [json.dumps(PROMPTS[0], sort_keys=True)]


# The rollout function: what comes back


def test_the_completion_goes_from_the_first_generated_token_to_the_last(
    service: ScriptedService, client: PushingClient
) -> None:
    service.rollouts.append(answering())
    columns = ServiceRolloutFunc(client, task_name="math")(PROMPTS, trainer())
    assert columns == {
        "prompt_ids": [[258, 10, 87, 261]] * 2,
        "completion_ids": [[30, 31, 20, 21, 32, END]] * 2,
        "logprobs": [[-0.5, -0.5, 0, 0, -0.5, -0.5]] * 2,
        "env_mask": [[1, 1, 0, 0, 1, 1]] * 2,
        "total_reward": [0, 1],
        "rewards": [{}, {}],
        "status": ["completed", "completed"],
        "answer": ["0", "1"],
    }
    assert service_reward(prompts=PROMPTS, **columns) == [0, 1]


@pytest.mark.parametrize(
    "lost", [LOST, {"status": "deadline"}, {"status": "cancelled"}], ids=["error", "deadline", "cancelled"]
)
def test_a_rollout_without_a_final_reward_is_masked_and_has_none(
    service: ScriptedService, client: PushingClient, lost: Json
) -> None:
    service.rollouts.append(answering({}, lost))
    columns = ServiceRolloutFunc(client, task_name="math")(PROMPTS, trainer())
    assert columns["total_reward"] == [0, None]
    assert columns["env_mask"] == [[1, 1, 0, 0, 1, 1], [0] * 6]


@pytest.mark.parametrize("log", [[prompt_message()], []], ids=["no completion", "no prompt either"])
def test_no_completion_is_empty(service: ScriptedService, client: PushingClient, log: list[Json]) -> None:
    service.rollouts.append(answering({**LOST, "message_log": log}))
    columns = ServiceRolloutFunc(client, task_name="math")(PROMPTS[:1], trainer())
    assert columns["prompt_ids"] == ([[258, 10, 87, 261]] if log else [[256]])
    assert columns["completion_ids"] == [[256]]
    assert columns["logprobs"] == [[0]]
    assert columns["env_mask"] == [[0]]


# The rollout function: weights


def test_weights_are_pushed_once_a_step_and_their_version_is_demanded(
    service: ScriptedService, client: PushingClient
) -> None:
    rollout_func, training = ServiceRolloutFunc(client, task_name="math"), trainer()
    for step in (0, 0, 1):
        training.state.global_step = step
        rollout_func(PROMPTS, training)
    assert len(client.pushed) == 2
    assert [body["policy"]["min_version"] for body in service.bodies] == [101, 101, 102]


def test_without_pushing_nothing_is_demanded(service: ScriptedService, client: PushingClient) -> None:
    ServiceRolloutFunc(client, task_name="math", push=False)(PROMPTS, trainer())
    assert client.pushed == []
    assert "policy" not in service.bodies[0]


def test_a_push_that_fails_ends_the_rollout_before_it_begins(service: ScriptedService, client: PushingClient) -> None:
    client.failure = ServiceUnreachable("Nobody is there.")
    with pytest.raises(ServiceUnreachable, match="Nobody is there"):
        ServiceRolloutFunc(client, task_name="math")(PROMPTS, trainer())
    assert service.bodies == []


@pytest.mark.parametrize("failure", [ServiceUnreachable("Nobody is there."), ValueError("They do not fit.")])
def test_other_processes_get_the_version_of_the_main_one_or_why_there_is_none(
    client: PushingClient, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    said: list[Any] = []

    def broadcast(objects: list[Any], **_: Any) -> list[Any]:
        said.append(objects)
        return objects

    monkeypatch.setattr(weights, "broadcast_object_list", broadcast)
    training, other = trainer(), trainer()
    other.accelerator.is_main_process = False
    assert weights.push_from_trainer(client, training) == 101
    client.failure = failure
    with pytest.raises(type(failure)):
        weights.push_from_trainer(client, training)
    assert said == [[101], [str(failure)]]
    monkeypatch.setattr(weights, "broadcast_object_list", lambda _objects, **_: said.pop())
    with pytest.raises(weights.WeightsNotPushed, match=f"could not push the weights: {failure}"):
        weights.push_from_trainer(client, other)
    assert weights.push_from_trainer(client, other) == 101
    assert len(client.pushed) == 1


def test_a_peft_model_is_refused(client: PushingClient) -> None:
    training = trainer()
    training.model.peft_config = {}
    with pytest.raises(ValueError, match="trains a PEFT adapter"):
        ServiceRolloutFunc(client, task_name="math")(PROMPTS, training)


def test_grpo_trains_on_what_the_service_played(
    service: ScriptedService, client: PushingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    service.rollouts.extend([answering(), answering({}, LOST)])
    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    grpo = GRPOTrainer(
        str(TINY_MODEL),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        reward_funcs=service_reward,
        rollout_func=ServiceRolloutFunc(client, task_name="math"),
    )
    grpo.train()
    assert [len(body["samples"]) for body in service.bodies] == [4, 4]
    assert [body["policy"] for body in service.bodies] == [{"min_version": 101}, {"min_version": 102}]
    first, second = grpo.state.log_history[:2]
    assert first["rewards/service_reward/mean"] == 1.5
    assert first["completions/mean_length"] == 4
    assert first["completions/clipped_ratio"] == 0
    assert second["rewards/service_reward/mean"] == 1
    assert first["grad_norm"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(client.pushed[0][name], client.pushed[1][name])


# The rollout worker


def async_args(**changed: Any) -> SimpleNamespace:
    limits: Json = {"num_generations": 2, "max_inflight_tasks": 4, "queue_maxsize": 1024, "max_staleness": 1}
    return trainer_args(**limits | changed)


@contextmanager
def worker(service: ScriptedService, rows: list[Json] = ROWS, args: Any = None, **options: Any) -> Iterator[Any]:
    """Stopped when the block ends; started by the test."""
    from rollout_client.trainers.trl_async import ServiceRolloutWorker

    made = ServiceRolloutWorker(
        AsyncRolloutClient(service.url), rows, args or async_args(), task_name="math", **options
    )
    try:
        yield made
    finally:
        made.stop()


def take(rollout_worker: Any, count: int) -> list[Any]:
    return [rollout_worker.rollout_buffer.get(timeout=10) for _ in range(count)]


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stays_at(service: ScriptedService, count: int) -> bool:
    """Whether `count` requests come, and then no more."""
    eventually(lambda: len(service.bodies) >= count)
    time.sleep(0.3)
    return len(service.bodies) == count


def test_the_worker_fills_the_buffer_group_by_group_with_what_the_trainer_takes(service: ScriptedService) -> None:
    service.rollouts.extend([answering({"rewards": {"sum": 0.0}}, {"rewards": {"sum": 1.0}})] * 2)
    with worker(service, ROWS[:1], async_args(max_inflight_tasks=2)) as rollout_worker:
        rollout_worker.start()
        first, second = take(rollout_worker, 2)
    assert [first.group_id, second.group_id] == [0, 0]
    assert first.prompt == PROMPTS[0]
    assert [message["role"] for message in first.completion] == ["assistant", "environment", "assistant", "environment"]
    assert first.input_ids.tolist() == [258, 10, 87, 261, 30, 31, 20, 21, 32, END]
    assert first.completion_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert first.old_log_probs.tolist() == [0, 0, 0, 0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert (first.input_ids.dtype, first.old_log_probs.dtype) == (np.int64, np.float32)
    deviation = 0.5**0.5
    assert [first.advantage, second.advantage] == pytest.approx([-0.5 / (deviation + 1e-4), 0.5 / (deviation + 1e-4)])
    assert second.metrics == {"reward": 1, "reward_std": pytest.approx(deviation), "rewards/sum": 1}


def test_the_worker_posts_a_group_as_one_sample_and_goes_over_the_dataset_again_and_again(
    service: ScriptedService,
) -> None:
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
        assert stays_at(service, 2)
        take(rollout_worker, 2)
        assert stays_at(service, 3)


def test_rollouts_without_a_final_reward_or_a_token_go_to_no_buffer_and_into_no_statistic(
    service: ScriptedService,
) -> None:
    empty = {"message_log": [prompt_message()]}
    service.rollouts.extend([answering({}, LOST, {}, empty)] * 50)
    with worker(service, args=async_args(num_generations=4), scale_rewards=False) as rollout_worker:
        rollout_worker.start()
        samples = take(rollout_worker, 2)
        metrics = rollout_worker.metrics_queue.get(timeout=10)
    assert [sample.metrics["reward"] for sample in samples] == [0, 2]
    assert [sample.advantage for sample in samples] == pytest.approx([-5 / 3, 1 / 3])
    assert metrics["rollout/not_final_total"] == 1
    assert metrics["sample/dropped_stale_total"] == 0


def test_a_sample_has_the_model_version_of_its_oldest_token_and_is_dropped_when_that_is_too_old(
    service: ScriptedService, client: PushingClient
) -> None:
    from rollout_client.trainers.trl_async import ServiceWeightTransfer

    transfer = ServiceWeightTransfer(client)
    with worker(service, args=async_args(max_inflight_tasks=2), weight_transfer=transfer) as rollout_worker:
        for model_version in (1, 2, 3):
            transfer.send_weights(iter([("w", torch.zeros(1))]))
            rollout_worker.update_model_version(model_version)
        mixed = {"message_log": two_turns(version=102, newer=103)}
        stale = {"message_log": two_turns(version=101, newer=103)}
        service.rollouts.extend([answering(mixed, stale)] * 50)
        rollout_worker.start()
        [sample, _] = take(rollout_worker, 2)
        metrics = rollout_worker.metrics_queue.get(timeout=10)
    assert sample.model_version == 2
    assert metrics["sample/dropped_stale_total"] == 1
    assert service.bodies[0]["policy"] == {"min_version": 103}


def test_a_worker_whose_request_was_refused_says_why(service: ScriptedService) -> None:
    from rollout_client.trainers.trl_async import WorkerFailed

    service.rollouts.extend([lambda _: problem(REJECTED)] * 50)
    with worker(service) as rollout_worker:
        rollout_worker.check_health(1)
        rollout_worker.start()
        eventually(lambda: rollout_worker._outcome.done())
        with pytest.raises(WorkerFailed, match=r"has ended: The request is not valid.*no task 'maths'"):
            rollout_worker.check_health(300)


def test_a_worker_all_of_whose_groups_are_lost_gives_up(service: ScriptedService) -> None:
    from rollout_client.trainers.trl_async import WorkerFailed

    service.rollouts.extend([answering(LOST)] * 50)
    with worker(service) as rollout_worker:
        rollout_worker.start()
        eventually(lambda: rollout_worker._outcome.done())
        with pytest.raises(WorkerFailed, match="2 of 2 rollouts have no final reward; idx 0 of task math"):
            rollout_worker.check_health(300)


def test_a_worker_that_does_not_answer_is_noticed(service: ScriptedService) -> None:
    from rollout_client.trainers.trl_async import WorkerFailed

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
        eventually(lambda: service.bodies)
        rollout_worker.stop()
        assert service.hung_up.wait(timeout=5)
        rollout_worker.stop()
        with pytest.raises(queue.Empty):
            rollout_worker.rollout_buffer.get_nowait()


# The asynchronous trainer


class TorchFlashAttention:
    """What tree attention calls of its CUDA kernel, written out: each segment attends to its own path, causally."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *_lengths: int,
        softmax_scale: float,
        **_options: Any,
    ) -> torch.Tensor:
        attended = []
        bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        for (start, end), (first, last) in bounds:
            before = (last - first) - (end - start)
            unseen = ~torch.ones(end - start, last - first, dtype=torch.bool).tril(before)
            scores = torch.einsum("qhd,khd->hqk", query[start:end], key[first:last]) * softmax_scale
            shares = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
            attended.append(torch.einsum("hqk,khd->qhd", shares, value[first:last]))
        return torch.cat(attended)


def test_async_grpo_trains_on_what_the_worker_brings_and_sends_its_weights(
    service: ScriptedService, client: PushingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from trl.experimental.async_grpo import async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    from rollout_client.trainers.trl_async import ServiceRolloutWorker, ServiceWeightTransfer

    monkeypatch.setattr(packing, "_flash_attn", TorchFlashAttention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    service.rollouts.extend([answering()] * 200)
    dataset = Dataset.from_list(ROWS)
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=8,
        token_budget=0,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    transfer = ServiceWeightTransfer(client)
    rollout_worker = ServiceRolloutWorker(
        AsyncRolloutClient(service.url), dataset, args, weight_transfer=transfer, task_name="math"
    )
    grpo = AsyncGRPOTrainer(
        str(TINY_MODEL), args=args, train_dataset=dataset, rollout_worker=rollout_worker, weight_transfer=transfer
    )
    grpo.train()
    assert grpo.state.global_step == 2
    assert transfer.version == 103
    assert service.bodies[0]["policy"] == {"min_version": 101}
    assert grpo.state.log_history[0]["reward"] == 0.5
    assert grpo.state.log_history[0]["grad_norm"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(client.pushed[0][name], client.pushed[-1][name])
