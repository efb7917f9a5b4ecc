"""`ServiceAgentLoopManager`, called as verl's `RayPPOTrainer` does (its source at commit 1dda039), over real sockets.

verl is not installed here. `DataProto` and `Config` below are stand-ins with what the trainer and the manager use of
`verl.protocol.DataProto` and OmegaConf.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from rollout_client.results import RolloutsNotFinal
from rollout_client.trainers import verl
from rollout_client.trainers.verl import ServiceAgentLoopManager, old_log_probs_report
from tests.clients.scripted_service import SUMMARY, Json, ScriptedService, result
from tests.clients.trainers.scripted_trainer import LOST, answering, prompt_message, response_message, two_turns

PAD = 0
REWARD_WORKERS = ("a worker of verl's reward loop",)
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=1, chat_template=None)


class Config(dict[str, Any]):
    """The access that verl's config allows: by attribute, and by `get`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class DataProto:
    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    @classmethod
    def from_dict(cls, tensors: Any = None, non_tensors: Any = None, meta_info: Any = None) -> Self:
        made = cls(tensors, non_tensors, meta_info)
        assert {len(tensor) for tensor in tensors.values()} == {len(made)}
        assert all(isinstance(column, np.ndarray) and len(column) == len(made) for column in non_tensors.values())
        return made

    def union(self, other: verl.DataProto) -> Self:
        assert not self.batch.keys() & other.batch.keys()
        for name in self.non_tensor_batch.keys() & other.non_tensor_batch.keys():
            assert self.non_tensor_batch[name].tolist() == other.non_tensor_batch[name].tolist()
        return type(self)(
            self.batch | other.batch, self.non_tensor_batch | other.non_tensor_batch, self.meta_info | other.meta_info
        )


def config(url: str, custom: Json | None = None, **rollout: Any) -> Config:
    settings = {"url": url, "task_name": "math"} | (custom or {})
    said = {
        "prompt_length": 6,
        "response_length": 8,
        "temperature": 0.75,
        "top_p": 0.9,
        "top_k": -1,
        "val_kwargs": Config(temperature=0, top_p=1.0, top_k=-1),
        "custom": Config(rollout_service=Config(settings)),
    }
    model = Config(path="model")
    return Config(actor_rollout_ref=Config(rollout=Config(said | rollout), model=model))


def column(*values: Any) -> NDArray[Any]:
    return np.fromiter(values, dtype=object, count=len(values))


def gen_batch(*uids: str, **columns: NDArray[Any]) -> DataProto:
    """What the trainer hands over: rows of `RLHFDataset`, repeated for each rollout of their prompt."""
    said = {
        "raw_prompt": column(*([{"role": "user", "content": f"What is {uid}?"}] for uid in uids)),
        "data_source": column(*("sums" for _ in uids)),
        "reward_model": column(*({"style": "rule", "ground_truth": uid} for uid in uids)),
        "extra_info": column(*({"index": place} for place in range(len(uids)))),
        "index": column(*range(len(uids))),
        "tools_kwargs": column(*({} for _ in uids)),
        "uid": column(*uids),
    }
    dummy = {"dummy_tensor": torch.zeros(len(uids), 1, dtype=torch.uint8)}
    return DataProto(dummy, said | columns, {"global_steps": 1})


Manager = Callable[..., ServiceAgentLoopManager]


@pytest.fixture
def manager(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Makes managers as `RayPPOTrainer.init_workers` does; `custom` is the config of the adapter."""
    monkeypatch.setattr(verl, "load_tokenizer", lambda _config: TOKENIZER)
    made: list[ServiceAgentLoopManager] = []

    def create(custom: Json | None = None, workers: Any = REWARD_WORKERS, **rollout: Any) -> ServiceAgentLoopManager:
        given = config(service.url, {"check_tokenizer": False} | (custom or {}), **rollout)
        made.append(
            ServiceAgentLoopManager.create(
                config=given, llm_client=object(), teacher_client=None, reward_loop_worker_handles=workers
            )
        )
        return made[-1]

    yield create
    for each in made:
        each.client.close()


def mixed_rollouts() -> Callable[[Json], Any]:
    """Of three rows: two turns by two versions; one turn; a failure. `two_turns` ends with an observation."""
    return answering(
        {"message_log": two_turns(version=7, newer=8), "total_reward": 0.5, "rewards": {"right": 1.0, "style": -0.5}},
        {"message_log": [prompt_message(), response_message(40, version=8)], "rewards": {"right": 1.0}},
        LOST,
    )


# What is posted


def test_rows_are_posted_as_samples_with_verls_sampling(service: ScriptedService, manager: Manager) -> None:
    manager({"max_rollout_turns": 3, "sampling": {"stop_strings": ["\n"]}}).generate_sequences(gen_batch("a", "b"))
    [body] = service.bodies
    assert body["samples"] == [
        {
            "idx": place,
            "task_name": "math",
            "messages": [{"role": "user", "content": f"What is {uid}?"}],
            "extra_env_info": {"ground_truth": uid},
        }
        for place, uid in enumerate("ab")
    ]
    assert body["sampling"] == {
        "stop_strings": ["\n"],
        "temperature": 0.75,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 8,
    }
    assert body["max_seq_len"] == 14
    assert body["max_rollout_turns"] == 3
    assert "deadline_s" not in body


def test_a_row_names_its_task_and_what_the_environment_needs(service: ScriptedService, manager: Manager) -> None:
    rows = gen_batch("a", "b", task_name=column("code", None), extra_env_info=column('{"tests": 2}', None))
    manager().generate_sequences(rows)
    posted = [(sample["task_name"], sample["extra_env_info"]) for sample in service.bodies[0]["samples"]]
    assert posted == [("code", {"tests": 2}), ("math", {"ground_truth": "b"})]


def test_columns_can_be_what_the_environment_needs(service: ScriptedService, manager: Manager) -> None:
    manager({"env_columns": ["data_source"]}).generate_sequences(gen_batch("a"))
    assert service.bodies[0]["samples"][0]["extra_env_info"] == {"data_source": "sums"}


def test_validation_has_its_own_sampling(service: ScriptedService, manager: Manager) -> None:
    rows = gen_batch("a")
    rows.meta_info = {"validate": True, "pad_token_id": PAD}
    manager().generate_sequences(rows)
    assert service.bodies[0]["sampling"] == {"temperature": 0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8}


def test_baselines_of_remax_are_greedy_and_every_row_keeps_its_place(
    service: ScriptedService, manager: Manager
) -> None:
    def by_idx(body: Json) -> JSONResponse:
        samples = [result(each["idx"], total_reward=float(each["idx"])) for each in body["samples"]]
        return JSONResponse({**SUMMARY, "samples": samples})

    service.rollouts += [by_idx, by_idx]
    rows = gen_batch("a", "b", "c", __do_sample__=np.array([True, False, True]))
    came = manager().generate_sequences(rows)
    greedy, sampled = service.bodies
    assert greedy["sampling"]["temperature"] == 0.0
    assert sampled["sampling"]["temperature"] == 0.75
    assert [sample["idx"] for sample in (*greedy["samples"], *sampled["samples"])] == [1, 0, 2]
    assert came.batch["rm_scores"].sum(-1).tolist() == [0, 1, 2]


# What comes back


def test_the_tensors_are_those_of_verls_own_manager(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(mixed_rollouts())
    came = manager().generate_sequences(gen_batch("a", "a", "a"))
    tensors = {name: tensor.tolist() for name, tensor in came.batch.items()}
    assert tensors == {
        "prompts": [[0, 0, 258, 10, 87, 261]] * 3,
        "responses": [[30, 31, 20, 21, 32, 261, 0, 0], [40, 0, 0, 0, 0, 0, 0, 0], [0] * 8],
        "response_mask": [[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8],
        "input_ids": [
            [0, 0, 258, 10, 87, 261, 30, 31, 20, 21, 32, 261, 0, 0],
            [0, 0, 258, 10, 87, 261, 40, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 258, 10, 87, 261, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        "attention_mask": [
            [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        "position_ids": [
            [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9],
            [0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4],
            [0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3],
        ],
        "rollout_log_probs": [[-0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0], [-0.5, 0, 0, 0, 0, 0, 0, 0], [0] * 8],
        # The failed row has the mean of the others, so that the baseline of its group is theirs.
        "rm_scores": [[0, 0, 0, 0, 0, 0.5, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0.75]],
    }
    floats = {name for name, tensor in came.batch.items() if tensor.dtype == torch.float32}
    assert floats == {"rollout_log_probs", "rm_scores"}
    assert all(tensor.dtype == torch.int64 for name, tensor in came.batch.items() if name not in floats)


def test_the_other_columns_are_those_that_the_trainer_reads_and_the_versions(
    service: ScriptedService, manager: Manager
) -> None:
    service.rollouts.append(mixed_rollouts())
    came = manager({"reward_names": ["right"]}).generate_sequences(gen_batch("a", "a", "a"))
    columns = {name: values.tolist() for name, values in came.non_tensor_batch.items() if name != "raw_prompt"}
    assert columns == {
        "__num_turns__": [4, 2, 4],
        "multi_modal_inputs": [{}, {}, {}],
        "turn_scores": [[], [], []],
        "tool_rewards": [None] * 3,
        "min_global_steps": [None] * 3,
        "max_global_steps": [None] * 3,
        "extras": [None] * 3,
        "weight_versions": [
            [{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 4, "end": 6}],
            [{"version": 8, "start": 0, "end": 1}],
            [],
        ],
        "min_weight_version": [7, 8, -1],
        "max_weight_version": [8, 8, -1],
        "status": ["completed", "completed", "error"],
        "rewards": [{"right": 1.0, "style": -0.5}, {"right": 1.0}, {}],
        "answer": ["0", "1", "2"],
        "finish_reason": ["stop"] * 3,
        "rollout_id": [None] * 3,
        "right": [1.0, 1.0, 1.0],
    }
    assert came.non_tensor_batch["__num_turns__"].dtype == np.int32
    assert came.meta_info == {
        "timing": {
            "rollout_service/mean_total_reward": 0.5,
            "rollout_service/total_turns": 4.0,
            "rollout_service/not_final_rate": 1 / 3,
        },
        "reward_extra_keys": ["right"],
    }


def test_the_trainer_takes_the_batch_apart_and_joins_it_with_its_own(
    service: ScriptedService, manager: Manager
) -> None:
    service.rollouts.append(mixed_rollouts())
    rows = gen_batch("a", "a", "a")
    kept = ("data_source", "reward_model", "extra_info", "uid")
    batch = DataProto(rows.batch, {name: rows.non_tensor_batch[name] for name in kept}, {"temperature": 0.75})
    came = manager(workers=None).generate_sequences(rows)
    timing_raw: dict[str, float] = {}
    timing_raw.update(came.meta_info.pop("timing"))
    batch = batch.union(came)
    assert [each.keys() for each in batch.non_tensor_batch["multi_modal_inputs"]] == [{}.keys()] * 3
    assert torch.sum(batch.batch["attention_mask"], dim=-1).tolist() == [10, 5, 4]
    assert all(isinstance(value, float) for value in timing_raw.values())
    assert batch.non_tensor_batch["index"].tolist() == [0, 1, 2]


def test_a_response_is_cut_at_its_length_and_scored_where_it_ends(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(answering({"total_reward": 2.0}))
    came = manager(response_length=3).generate_sequences(gen_batch("a"))
    assert came.batch["responses"].tolist() == [[30, 31, 20]]
    assert came.batch["response_mask"].tolist() == [[1, 1, 0]]
    assert came.batch["rm_scores"].tolist() == [[0, 0, 2]]
    assert came.non_tensor_batch["max_weight_version"].tolist() == [0]


def rewarded_turns(*rewards: float | None) -> list[Json]:
    log = two_turns()
    for message, reward in zip([message for message in log if "generation_logprobs" in message], rewards, strict=True):
        message["reward"] = reward
    return log


def test_turns_are_scored_at_the_last_tokens_of_their_responses_where_the_config_says_so(
    service: ScriptedService, manager: Manager
) -> None:
    service.rollouts.append(
        answering(
            {"message_log": rewarded_turns(0.25, 0.5), "total_reward": 0.75},
            {"message_log": rewarded_turns(2.0, None), "total_reward": 5.0},
            {"message_log": [prompt_message()], "total_reward": 0.5},
            LOST | {"message_log": rewarded_turns(9.0, 9.0)},
        )
    )
    came = manager({"turn_rewards": True}).generate_sequences(gen_batch("a", "a", "b", "b"))
    assert came.batch["rm_scores"].tolist() == [
        [0, 0.25, 0, 0, 0, 0.5, 0, 0],
        [0, 2, 0, 0, 0, 3, 0, 0],  # what the total has beyond the turns is the last one's
        [0, 0, 0, 0, 0, 0, 0, 0.5],
        [0, 0, 0, 0, 0, 0, 0, 0.5],
    ]


def test_a_turn_that_may_not_be_trained_is_masked_and_scored_with_the_one_that_may(
    service: ScriptedService, manager: Manager
) -> None:
    log = rewarded_turns(0.25, 0.5)
    next(message for message in log if "generation_logprobs" in message)["constrained"] = True
    service.rollouts.append(answering({"message_log": log, "total_reward": 0.75}))
    came = manager({"turn_rewards": True}).generate_sequences(gen_batch("a"))
    assert came.batch["response_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert came.batch["rm_scores"].tolist() == [[0, 0, 0, 0, 0, 0.75, 0, 0]]


def test_the_reward_of_a_turn_that_was_cut_away_is_where_the_response_ends(
    service: ScriptedService, manager: Manager
) -> None:
    for length, expected in ((3, [[0, 0.25, 0.5]]), (2, [[0, 0.75]])):
        service.rollouts.append(answering({"message_log": rewarded_turns(0.25, 0.5), "total_reward": 0.75}))
        came = manager({"turn_rewards": True}, response_length=length).generate_sequences(gen_batch("a"))
        assert came.batch["rm_scores"].tolist() == expected


def test_a_rollout_is_scored_at_its_last_token_by_default(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(answering({"message_log": rewarded_turns(0.25, 0.5), "total_reward": 0.75}))
    came = manager().generate_sequences(gen_batch("a"))
    assert came.batch["rm_scores"].tolist() == [[0, 0, 0, 0, 0, 0.75, 0, 0]]
    assert came.non_tensor_batch["turn_scores"].tolist() == [[0.25, 0.5]]


# Rows without a final reward


@pytest.mark.parametrize("lost", [LOST, {"status": "deadline"}, {"status": "stale"}])
def test_a_lost_row_without_siblings_has_the_mean_of_the_batch(
    service: ScriptedService, manager: Manager, lost: Mapping[str, Any]
) -> None:
    service.rollouts.append(answering({"total_reward": 1.0}, {"total_reward": 0.0}, dict(lost)))
    came = manager().generate_sequences(gen_batch("a", "a", "b"))
    assert came.batch["rm_scores"].sum(-1).tolist() == [1, 0, 0.5]
    assert came.batch["response_mask"].sum(-1).tolist() == [4, 4, 0]


def test_a_prompt_that_has_no_room_is_a_lost_row(service: ScriptedService, manager: Manager) -> None:
    short = [{"role": "user", "content": "", "token_ids": [5]}, response_message(40)]
    service.rollouts.append(answering({}, {"message_log": short}))
    came = manager(prompt_length=3).generate_sequences(gen_batch("a", "b"))
    assert came.batch["prompts"].tolist() == [[10, 87, 261], [0, 0, 5]]
    assert came.batch["attention_mask"].sum(-1).tolist() == [3, 2]


def test_lost_rows_raise_where_that_is_wanted(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(mixed_rollouts())
    with pytest.raises(RolloutsNotFinal, match="1 of 3 rollouts"):
        manager({"not_final": "raise"}).generate_sequences(gen_batch("a", "a", "a"))


def test_a_batch_without_one_final_reward_raises(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(answering(LOST))
    with pytest.raises(RolloutsNotFinal, match="2 of 2 rollouts"):
        manager().generate_sequences(gen_batch("a", "b"))


# What verl has computed


def test_old_log_probs_are_reported_with_what_verl_trains_on_and_without_lost_rows(
    service: ScriptedService, manager: Manager
) -> None:
    ids = [{"rollout_id": name} for name in ("first", "second", "lost", "cut")]
    one_turn = [prompt_message(), response_message(40)]
    service.rollouts.append(answering(ids[0], ids[1] | {"message_log": one_turn}, ids[2] | LOST, ids[3]))
    came = manager(response_length=6).generate_sequences(gen_batch("a", "a", "a", "a"))
    # verl reorders its rows, and balances them over its workers.
    data = DataProto.from_dict(
        {name: tensor[[3, 2, 1, 0]] for name, tensor in came.batch.items()},
        {name: values[[3, 2, 1, 0]] for name, values in came.non_tensor_batch.items()},
    )
    data.batch["old_log_probs"] = -data.batch["responses"].float()
    data.batch["response_mask"][0] = 1
    prompt, two_turns_long = [258, 10, 87, 261], [30, 31, 20, 21, 32, 261]
    columns = old_log_probs_report(data)
    assert columns["rollouts"] == ["cut", "second", "first"]
    negated = [-each for each in two_turns_long]
    assert [row.tolist() for row in columns["logprobs"]] == [negated, [-40], negated]
    assert [row.tolist() for row in columns["masks"] or ()] == [[1] * 6, [1], [1, 1, 0, 0, 1, 1]]
    assert [row.tolist() for row in columns["token_ids"] or ()] == [
        prompt + two_turns_long,
        [*prompt, 40],
        prompt + two_turns_long,
    ]
    assert columns["starts"] == [4, 4, 4]


def test_a_batch_without_a_response_is_not_reported(service: ScriptedService, manager: Manager) -> None:
    service.rollouts.append(answering({}))
    data = manager().generate_sequences(gen_batch("a"))
    data.batch["attention_mask"][:, -8:] = 0
    with pytest.raises(ValueError, match="no row of the batch has a response"):
        old_log_probs_report(data)


# The start


def test_a_setting_that_is_not_known_is_refused(manager: Manager) -> None:
    with pytest.raises(ValueError, match="max_turns"):
        manager({"max_turns": 3})


def test_distillation_is_refused(service: ScriptedService) -> None:
    with pytest.raises(ValueError, match="distillation"):
        ServiceAgentLoopManager.create(config=config(service.url), teacher_client={"teacher": object()})


def test_the_tokenizer_is_checked_at_the_start(service: ScriptedService, manager: Manager) -> None:
    manager({"check_tokenizer": True})
    assert service.info_requests == ["/info"]
