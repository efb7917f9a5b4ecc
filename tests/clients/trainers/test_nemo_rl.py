"""Batches of NeMo-RL against a scripted service: what is posted, what comes back, what failures become."""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fastapi.responses import JSONResponse

from rollout_client import RolloutClient
from rollout_client.results import RolloutsNotFinal
from rollout_client.trainers.nemo_rl import report_prev_logprobs, run_async_multi_turn_rollout, run_multi_turn_rollout
from tests.clients.scripted_service import SUMMARY, Json, ScriptedService, result
from tests.clients.trainers.scripted_trainer import LOST, response_message

Run = Callable[..., tuple[Any, dict[str, Any]]]


class BatchedDataDict(UserDict[str, Any]):
    """As NeMo-RL's, a dict of columns."""


@pytest.fixture
def run(service: ScriptedService, client: RolloutClient) -> Run:
    service.rollouts.append(echo)
    return partial(run_multi_turn_rollout, client, max_seq_len=64)


def played(posted: Json, **fields: Any) -> Json:
    """One turn after the posted log."""
    observation = {"role": "environment", "content": "", "token_ids": []}
    log = [*posted["message_log"], response_message(7, 8) | {"reward": 1.0}, observation]
    return result(posted["idx"], message_log=log, extra_env_info={"seen": 1}, **fields)


def answer(*samples: Json) -> JSONResponse:
    return JSONResponse({**SUMMARY, "samples": samples})


def echo(body: Json) -> JSONResponse:
    return answer(*map(played, body["samples"]))


def scripted(service: ScriptedService, *fields: Json) -> None:
    """The next answer: every sample played, with these fields each."""
    service.rollouts.clear()
    service.rollouts.append(
        lambda body: answer(*(played(posted, **of) for posted, of in zip(body["samples"], fields, strict=True)))
    )


def batch(size: int = 2, prompts: list[int] | None = None, **columns: Any) -> BatchedDataDict:
    ids = prompts or list(range(1, size + 1))
    return BatchedDataDict(
        {
            "message_log": [
                [{"role": "user", "content": "2+2?", "token_ids": torch.tensor([token, 5]), "mine": "kept"}]
                for token in ids
            ],
            "extra_env_info": [{"ground_truth": "4"} for _ in ids],
            "task_name": ["math" for _ in ids],
            "idx": [40 + place for place in range(len(ids))],
            "length": torch.tensor([2 for _ in ids]),
            "loss_multiplier": torch.ones(len(ids)),
        }
        | columns
    )


# What is posted


def test_a_batch_is_posted_as_message_logs_with_the_arguments_of_nemo_rl(service: ScriptedService, run: Run) -> None:
    run(batch(stop_strings=[["</a>"], None]), max_rollout_turns=3, sampling={"temperature": 0.5})
    prompt = {"role": "user", "content": "2+2?"}
    shared = {"task_name": "math", "extra_env_info": {"ground_truth": "4"}}
    assert service.bodies == [
        {
            "samples": [
                {"idx": 0, **shared, "message_log": [{**prompt, "token_ids": [1, 5]}], "stop_strings": ["</a>"]},
                {"idx": 1, **shared, "message_log": [{**prompt, "token_ids": [2, 5]}]},
            ],
            "sampling": {"temperature": 0.5},
            "max_seq_len": 64,
            "max_rollout_turns": 3,
            "schedule": "lockstep",
        }
    ]


@pytest.mark.usefixtures("run")
def test_the_async_function_asks_for_its_schedule_and_greedy(service: ScriptedService, client: RolloutClient) -> None:
    came, metrics = run_async_multi_turn_rollout(client, batch(1), 64, greedy=True, policy={"min_version": 3})
    assert (came["total_reward"].tolist(), metrics) == ([1], SUMMARY["metrics"])
    [body] = service.bodies
    del body["samples"]
    assert body == {
        "sampling": {"greedy": True},
        "max_seq_len": 64,
        "max_rollout_turns": 999999,
        "schedule": "async",
        "policy": {"min_version": 3},
    }


# What comes back


@pytest.mark.parametrize("kind", [BatchedDataDict, dict])
def test_the_batch_comes_back_with_its_class_and_every_field(run: Run, kind: Any) -> None:
    given = kind(batch(flag=["a", "b"]))
    came, metrics = run(given)
    assert (type(came), metrics) == (kind, SUMMARY["metrics"])
    tensors = {name: (came[name].dtype, came[name].tolist()) for name in ("total_reward", "truncated")}
    assert tensors == {"total_reward": (torch.float32, [1, 1]), "truncated": (torch.bool, [False, False])}
    assert (came["extra_env_info"], came["status"]) == ([{"seen": 1}] * 2, ["completed"] * 2)
    kept = ("task_name", "idx", "flag", "length", "loss_multiplier")
    assert [came[name] is given[name] for name in kept] == [True] * len(kept)
    assert [len(log) for log in given["message_log"]] == [1, 1]
    assert "total_reward" not in given


def test_new_messages_have_tensors_and_the_prompt_keeps_its_own(run: Run) -> None:
    given = batch(1)
    [[prompt, response, observation]] = run(given)[0]["message_log"]
    assert prompt is given["message_log"][0][0]
    ids, logprobs = response["token_ids"], response["generation_logprobs"]
    assert (ids.dtype, ids.tolist()) == (torch.int64, [7, 8])
    assert (logprobs.dtype, logprobs.tolist()) == (torch.float32, [-0.5, -0.5])
    assert (response["role"], response["content"], response["finish_reason"]) == ("assistant", "said", "stop")
    assert (observation["token_ids"].dtype, observation["token_ids"].shape) == (torch.int64, (0,))
    assert "generation_logprobs" not in observation


# Samples without a final reward


def test_a_sample_that_failed_raises_by_default_and_is_named(service: ScriptedService, run: Run) -> None:
    scripted(service, {}, LOST)
    with pytest.raises(RolloutsNotFinal, match=r"^1 of 2 rollouts have no final reward; idx 1 of task math") as raised:
        run(batch())
    assert [sample.idx for sample in raised.value.samples] == [1]


def test_a_masked_sample_weighs_nothing_and_keeps_the_mean_of_its_prompt(service: ScriptedService, run: Run) -> None:
    scripted(service, {"total_reward": 0.5}, LOST, {"total_reward": 0.0}, {"total_reward": 8.0})
    came, _ = run(batch(prompts=[1, 1, 1, 2]), not_final="mask")
    assert came["loss_multiplier"].tolist() == [1, 0, 1, 1]
    assert came["total_reward"].tolist() == [0.5, 0.25, 0, 8]
    assert came["status"] == ["completed", "error", "completed", "completed"]


def test_a_sample_cut_off_by_the_deadline_is_masked(service: ScriptedService, run: Run) -> None:
    scripted(service, {"status": "deadline", "total_reward": 0.75})
    given = {name: column for name, column in batch(1).items() if name != "loss_multiplier"}
    came, _ = run(given, not_final="mask", deadline_s=1)
    assert (came["loss_multiplier"].tolist(), came["total_reward"].tolist()) == ([0], [0])


# Batches that are run again


PART: Json = {"role": "assistant", "content": "ab", "token_ids": [7, 8], "generation_logprobs": [-0.25, -0.5]}
MORE: Json = {"token_ids": [7, 8, 9, 10], "generation_logprobs": [-0.25, -0.5, -0.75, -1.0], "finish_reason": "stop"}
WHOLE = PART | MORE | {"content": "abcd"}
RIGHT = {"role": "environment", "content": "right", "token_ids": [11]}
CUT: Json = {"status": "deadline", "total_reward": None}


def answering_in_turn(service: ScriptedService, *logs: Callable[[list[Json]], list[Json]], **fields: Any) -> None:
    """The next answer: the log of each sample made of its posted one, by its place in the batch."""

    def in_turn(body: Json) -> JSONResponse:
        made = [log(posted["message_log"]) for posted, log in zip(body["samples"], logs, strict=True)]
        return answer(*(result(place, message_log=log, **fields) for place, log in enumerate(made)))

    service.rollouts.clear()
    service.rollouts.append(in_turn)


def cut_once(service: ScriptedService, run: Run, given: BatchedDataDict) -> Any:
    """The batch after a run in whose first response the deadline cut off every sample."""
    answering_in_turn(service, *[lambda log: [*log, PART]] * len(given["task_name"]), **CUT)
    came, _ = run(given, not_final="mask")
    return came


def test_a_response_that_was_cut_off_continues_as_one_message(service: ScriptedService, run: Run) -> None:
    once = cut_once(service, run, batch(1))
    once["message_log"][0][-1] |= {"token_loss_mask": torch.ones(2), "mine": "kept"}
    answering_in_turn(service, lambda log: [*log[:-1], {**WHOLE, "reward": 1.0}, RIGHT], total_reward=1.0)
    twice, _ = run(once, not_final="mask")
    [[prompt, response, observation]] = twice["message_log"]
    assert service.bodies[1]["samples"][0]["message_log"][-1] == PART
    assert prompt is once["message_log"][0][0]
    assert response.pop("token_ids").tolist() == [7, 8, 9, 10]
    assert response["generation_logprobs"].dtype == torch.float32
    assert response.pop("generation_logprobs").tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert response == {"role": "assistant", "content": "abcd", "finish_reason": "stop", "reward": 1.0, "mine": "kept"}
    assert observation["content"] == "right"
    assert once["message_log"][0][-1]["token_ids"].tolist() == [7, 8]


def test_a_whole_response_whose_step_was_missing_gets_its_reward(service: ScriptedService, run: Run) -> None:
    answering_in_turn(service, lambda log: [*log, WHOLE], **CUT)
    once, _ = run(batch(1), not_final="mask")
    answering_in_turn(service, lambda log: [*log[:-1], {**log[-1], "reward": 1.0}, RIGHT])
    [[_, response, _]] = run(once)[0]["message_log"]
    assert response["reward"] == 1.0


def test_the_calls_of_a_posted_response_are_posted_with_it(service: ScriptedService, run: Run) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked = {**WHOLE, "tool_calls": [call], "parsed_content": "ab", "reasoning_content": "hm"}
    told = {"role": "tool", "content": "3", "token_ids": [12], "tool_call_id": "c", "name": "add"}
    answering_in_turn(service, lambda log: [*log, asked, told], **CUT)
    once, _ = run(batch(1), not_final="mask")
    service.rollouts.append(echo)
    run(once)
    assert service.bodies[1]["samples"][0]["message_log"][1:] == [asked, told]


def test_a_sample_that_ends_in_a_later_run_weighs_again_what_it_weighed(service: ScriptedService, run: Run) -> None:
    once = cut_once(service, run, batch(4, loss_multiplier=torch.tensor([1.0, 0.5, 0.0, 1.0])))
    assert once["loss_multiplier"].tolist() == [0, 0, 0, 0]
    scripted(service, {}, {}, {}, LOST)
    twice, _ = run(once, not_final="mask")
    assert twice["loss_multiplier"].tolist() == [1, 0.5, 0, 0]
    scripted(service, {}, {}, {}, {})
    thrice, _ = run(twice)
    assert thrice["loss_multiplier"].tolist() == [1, 0.5, 0, 1]
    assert thrice["loss_multiplier"].dtype == torch.float32


def test_what_the_trainer_masks_between_runs_stays_masked(service: ScriptedService, run: Run) -> None:
    scripted(service, {}, LOST)
    once, _ = run(batch(), not_final="mask")
    once["loss_multiplier"][0] = 0
    scripted(service, {}, {})
    twice, _ = run(once, not_final="mask")
    assert twice["loss_multiplier"].tolist() == [0, 1]


def test_resumed_rollouts_of_one_prompt_are_one_group(service: ScriptedService, run: Run) -> None:
    answering_in_turn(service, lambda log: [*log, PART], lambda log: [*log, WHOLE], lambda log: log, **CUT)
    once, _ = run(batch(prompts=[1, 1, 1]), not_final="mask")
    scripted(service, {"total_reward": 1.0}, {"total_reward": 0.5}, LOST)
    twice, _ = run(once, not_final="mask")
    assert twice["total_reward"].tolist() == [1, 0.5, 0.75]


# What NeMo-RL has computed


def test_prev_logprobs_are_reported_without_padding_in_both_masks(client: RolloutClient) -> None:
    reported: list[tuple[Any, Any, dict[str, Any]]] = []
    untyped: Any = client
    untyped.report_logprobs = lambda rollouts, logprobs, **options: reported.append((rollouts, logprobs, options))
    train_data = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
        "input_lengths": torch.tensor([3, 2]),
        "prev_logprobs": torch.tensor([[0.0, -0.25, -0.5], [0.0, -0.75, 9.0]]),
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 1]]),
    }
    report_prev_logprobs(client, {"rollout_id": ["a", "b"]}, train_data)
    report_prev_logprobs(client, {"rollout_id": ["a", "b"]}, train_data | {"sample_mask": torch.tensor([1.0, 0.0])})
    for (rollouts, logprobs, options), masks in zip(reported, ([[0, 1, 1], [0, 1]], [[0, 1, 1], [0, 0]]), strict=True):
        assert rollouts == ["a", "b"]
        assert [row.tolist() for row in logprobs] == [[0, -0.25, -0.5], [0, -0.75]]
        assert [row.tolist() for row in options.pop("masks")] == masks
        assert [row.tolist() for row in options.pop("token_ids")] == [[1, 2, 3], [4, 5]]
        assert options == {}


def test_an_untrainable_response_has_another_role_but_is_posted_as_one(service: ScriptedService, run: Run) -> None:
    forced = {**WHOLE, "constrained": True}
    greedy = {**WHOLE, "sampled_with": {"temperature": 0.0}}
    answering_in_turn(service, lambda log: [*log, forced, RIGHT, greedy, RIGHT, PART], **CUT)
    once, _ = run(batch(1), not_final="mask")
    [log] = once["message_log"]
    assert [message["role"] for message in log] == ["user", *["environment"] * 4, "assistant"]
    answering_in_turn(service, lambda log: [*log[:-1], WHOLE], total_reward=1.0)
    again, _ = run(once)
    posted = service.bodies[1]["samples"][0]["message_log"]
    assert [message["role"] for message in posted] == ["user", *["assistant", "environment"] * 2, "assistant"]
    assert again["message_log"][0][-1]["token_ids"].tolist() == WHOLE["token_ids"]
    assert (posted[1]["constrained"], posted[3]["sampled_with"]["temperature"]) == (True, 0.0)
