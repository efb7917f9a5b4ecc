"""`ServiceRolloutFunc` against a scripted service: what it posts, what it returns, which weights it requires."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from PIL import Image
from safetensors.torch import load_file
from trl.data_utils import prepare_multimodal_messages

from rollout_client import Sampling
from rollout_client.trainers.trl import ServiceRolloutFunc, service_reward
from tests.clients.scripted_service import Json, ScriptedService
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
    trainer,
)
from tests.paths import TINY_MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:.*torch.jit.script_method"),
]


def test_a_prompt_is_a_sample_with_the_trainers_sampling(service: ScriptedService, client: PushingClient) -> None:
    sampling = Sampling(temperature=0.5, stop_strings=["x"])
    rollout_func = ServiceRolloutFunc(client, task_name="math", sampling=sampling, max_rollout_turns=3, max_seq_len=64)
    training = trainer(min_p=0.125, chat_template_kwargs={"enable_thinking": False})
    rollout_func([PROMPTS[1], PROMPTS[1], PROMPTS[0]], training)
    info = [row["extra_env_info"] for row in ROWS]
    assert service.bodies == [
        {
            "samples": [
                {"idx": 0, "task_name": "math", "messages": PROMPTS[1], "extra_env_info": info[1]},
                {"idx": 1, "task_name": "math", "messages": PROMPTS[1], "extra_env_info": info[1]},
                {"idx": 2, "task_name": "math", "messages": PROMPTS[0], "extra_env_info": info[0]},
            ],
            "sampling": {
                **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.125, "max_new_tokens": 8},
                "stop_strings": ["x"],
            },
            "chat_template_kwargs": {"enable_thinking": False},
            "max_rollout_turns": 3,
            "max_seq_len": 64,
            "policy": {"min_version": 101},
        }
    ]


def test_the_trainers_tokenizer_is_checked_once_before_the_first_rollout(
    client: PushingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(client, "check_tokenizer", checked.append)
    trained, rollout_func = trainer(), ServiceRolloutFunc(client, task_name="math")
    rollout_func(PROMPTS, trained)
    rollout_func(PROMPTS, trained)
    assert checked == [trained.processing_class]
    ServiceRolloutFunc(client, task_name="math", check_tokenizer=False)(PROMPTS, trained)
    assert len(checked) == 1


def test_a_prompt_of_text_is_tokenized_by_the_trainers_own(service: ScriptedService, client: PushingClient) -> None:
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
        (ROWS, {"generation_kwargs": {"typical_p": 0.5}}, "supports no generation_kwargs"),
        ([*ROWS, {**ROWS[0], "extra_env_info": {}}], {}, "Two rows of the dataset have the same prompt and differ"),
    ],
)
def test_what_cannot_be_played_as_the_trainer_means_it_is_a_value_error(
    service: ScriptedService, client: PushingClient, rows: Any, args: Json, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ServiceRolloutFunc(client, task_name="math")(PROMPTS[:1], trainer(rows, **args))
    assert service.bodies == []


def test_prompts_that_show_images_are_refused(service: ScriptedService, client: PushingClient) -> None:
    rows = datasets.Dataset.from_list([{**ROWS[0], "images": [Image.new("RGB", (4, 3))]}])
    shown = prepare_multimodal_messages(PROMPTS[0], images=rows[0]["images"])
    processed = trainer(rows)
    processed.processing_class = object()
    with pytest.raises(
        ValueError, match="A prompt of the dataset shows images, and this adapter trains on tokens alone"
    ):
        ServiceRolloutFunc(client, task_name="math")([shown], processed)
    assert service.bodies == []


def test_a_completion_is_from_the_first_to_the_last_generated(service: ScriptedService, client: PushingClient) -> None:
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
        "finish_reason": ["stop", "stop"],
        "turn_rewards": [[0, 0], [0, 1]],
        "rollout_id": [None, None],
    }
    everything: dict[str, Any] = {"prompts": PROMPTS, **columns}
    assert service_reward(**everything) == [0, 1]


@pytest.mark.parametrize("lost", [LOST, {"status": "deadline"}], ids=["error", "deadline"])
def test_a_rollout_without_final_reward_is_masked(service: ScriptedService, client: PushingClient, lost: Json) -> None:
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


def test_each_step_pushes_weights_and_demands_their_version(service: ScriptedService, client: PushingClient) -> None:
    rollout_func, training = ServiceRolloutFunc(client, task_name="math"), trainer()
    for step in (0, 0, 1):
        training.state.global_step = step
        rollout_func(PROMPTS, training)
        with torch.no_grad():
            training.model.weight += 1
    assert torch.equal(client.pushed[1]["weight"], client.pushed[0]["weight"] + 2)
    assert client.kinds == ["full", "delta"]
    assert [body["policy"]["min_version"] for body in service.bodies] == [101, 101, 102]


@pytest.mark.parametrize("name", [None, "run-b"])
def test_with_no_push_no_version_is_demanded(service: ScriptedService, client: PushingClient, name: str | None) -> None:
    ServiceRolloutFunc(client, task_name="math", push=False, policy_name=name)(PROMPTS, trainer())
    assert client.pushed == []
    assert [body.get("policy") for body in service.bodies] == [name and {"name": name}]


@pytest.mark.parametrize("name", [None, "run-b"])
def test_a_peft_adapter_is_pushed_under_the_name_of_its_policy(
    service: ScriptedService, client: PushingClient, name: str | None
) -> None:
    training = trainer()
    training.model.peft_config = {}
    rollout_func = ServiceRolloutFunc(client, task_name="math", policy_name=name)
    rollout_func(PROMPTS, training)
    rollout_func(PROMPTS, training)
    assert client.adapters == [(training.model, name)]
    demands = [body["policy"] for body in service.bodies]
    assert demands == [{"min_version": 101} | ({} if name is None else {"name": name})] * 2


@pytest.mark.parametrize(
    ("options", "has_adapter", "message"),
    [
        ({"policy_name": "run-b"}, False, "policy_name=run-b: a named policy is an adapter, and the trainer trains no"),
        ({}, True, "trains a PEFT adapter whose weights are sharded over processes"),
    ],
)
def test_named_full_weights_and_sharded_adapters_are_refused(
    client: PushingClient, options: Any, has_adapter: bool, message: str
) -> None:
    training = trainer()
    training.accelerator.distributed_type = DistributedType.FSDP
    if has_adapter:
        training.model.peft_config = {}
    with pytest.raises(ValueError, match=message):
        ServiceRolloutFunc(client, task_name="math", **options)(PROMPTS, training)


def grpo_trainer(folder: Path, rollout_func: Any) -> Any:
    """TRL's own trainer of the tiny model: two steps of four rollouts."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    steps: Json = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    args = GRPOConfig(output_dir=str(folder), **ON_PROCESSORS, **steps)
    rows = Dataset.from_list(ROWS)
    return GRPOTrainer(
        str(TINY_MODEL), args=args, train_dataset=rows, reward_funcs=service_reward, rollout_func=rollout_func
    )


def test_grpo_trains_on_what_the_service_played(
    service: ScriptedService, client: PushingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    style, both = {"rewards": {"style": 0.5}}, {"rewards": {"correctness": 1.0, "style": 0.25}}
    service.rollouts.extend([answering(style, both), answering(style, LOST | both)])
    client.layout = layout_of(load_file(TINY_MODEL / "model.safetensors"))
    grpo = grpo_trainer(tmp_path, ServiceRolloutFunc(client, task_name="math"))
    grpo.train()
    assert [len(body["samples"]) for body in service.bodies] == [4, 4]
    assert [body["policy"] for body in service.bodies] == [{"min_version": 101}, {"min_version": 102}]
    first, second = grpo.state.log_history[:2]
    assert first["rewards/service_reward/mean"] == 1.5
    assert first["completions/mean_length"] == 4
    assert first["completions/clipped_ratio"] == 0
    assert second["rewards/service_reward/mean"] == 1
    assert (first["rewards/correctness/mean"], first["rewards/style/mean"]) == (1, 0.375)
    assert ("rewards/correctness/mean" in second, second["rewards/style/mean"]) == (False, 0.5)
    assert first["grad_norm"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(client.pushed[0][name], client.pushed[1][name])
