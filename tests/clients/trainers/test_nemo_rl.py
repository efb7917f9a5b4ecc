"""Batches of NeMo-RL against a scripted service: what is posted, what comes back, what failures become."""

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.responses import JSONResponse

from deployments.protocols.generation import Generation, GenerationRequest
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client import NotJson, RolloutClient
from rollout_client.results import RolloutsNotFinal
from rollout_client.trainers.nemo_rl import (
    report_prev_logprobs,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.settings import RequestLimits
from tests.clients.scripted_service import SUMMARY, Json, ScriptedService, result, running, served
from tests.service.scripted import ScriptedGenerator
from tests.service.scripted_http import VOCAB_SIZE, ScriptedHttp

Run = Callable[..., tuple[Any, dict[str, Any]]]
LOST = {
    "status": "error",
    "total_reward": None,
    "error": {"kind": "timeout", "message": "Too slow.", "retryable": True},
}


class BatchedDataDict(UserDict[str, Any]):
    """As NeMo-RL's, a dict of columns."""


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running(ScriptedService()) as scripted:
        scripted.rollouts.append(echo)
        yield scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[RolloutClient]:
    with RolloutClient(service.url) as rollout_client:
        yield rollout_client


@pytest.fixture(params=[run_multi_turn_rollout, run_async_multi_turn_rollout], ids=["lockstep", "async"])
def run(request: pytest.FixtureRequest, client: RolloutClient) -> Run:
    return partial(request.param, client, max_seq_len=64)


def played(posted: Json, **fields: Any) -> Json:
    """One turn after the posted log."""
    response = {
        "role": "assistant",
        "content": "4",
        "token_ids": [7, 8],
        "generation_logprobs": [-0.25, -0.75],
        "finish_reason": "stop",
        "reward": 1.0,
    }
    observation = {"role": "environment", "content": "", "token_ids": []}
    log = [*posted["message_log"], response, observation]
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


def test_a_batch_is_posted_as_message_logs_with_the_arguments_of_nemo_rl(
    service: ScriptedService, client: RolloutClient
) -> None:
    run_multi_turn_rollout(client, batch(stop_strings=[["</a>"], None]), 64, 3, sampling={"temperature": 0.5})
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


def test_the_async_function_asks_for_the_async_schedule_and_greedy_is_greedy(
    service: ScriptedService, client: RolloutClient
) -> None:
    run_async_multi_turn_rollout(client, batch(1), 64, greedy=True, policy={"min_version": 3})
    [body] = service.bodies
    del body["samples"]
    assert body == {
        "sampling": {"greedy": True},
        "max_seq_len": 64,
        "max_rollout_turns": 999999,
        "schedule": "async",
        "policy": {"min_version": 3},
    }


def test_a_log_that_came_back_can_be_posted_again(service: ScriptedService, run: Run) -> None:
    once, _ = run(batch(1))
    service.rollouts.append(echo)
    run(once)
    [[_, response, observation]] = [posted["message_log"] for posted in service.bodies[1]["samples"]]
    assert response == played({"idx": 0, "message_log": []})["message_log"][0]
    assert observation == {"role": "environment", "content": "", "token_ids": []}


# What comes back


def test_the_batch_comes_back_with_its_class_and_every_field(run: Run) -> None:
    came, metrics = run(batch(flag=["a", "b"]))
    assert type(came) is BatchedDataDict
    assert came["idx"] == [40, 41]
    assert came["flag"] == ["a", "b"]
    assert came["length"].tolist() == [2, 2]
    assert came["loss_multiplier"].tolist() == [1, 1]
    assert came["extra_env_info"] == [{"seen": 1}, {"seen": 1}]
    assert came["total_reward"].dtype == torch.float32
    assert came["total_reward"].tolist() == [1, 1]
    assert came["truncated"].dtype == torch.bool
    assert came["truncated"].tolist() == [False, False]
    assert came["status"] == ["completed", "completed"]
    assert metrics == SUMMARY["metrics"]


def test_new_messages_have_tensors_and_the_prompt_keeps_its_own(run: Run) -> None:
    given = batch(1)
    came, _ = run(given)
    [[prompt, response, observation]] = came["message_log"]
    assert prompt is given["message_log"][0][0]
    assert response["token_ids"].dtype == observation["token_ids"].dtype == torch.int64
    assert response["token_ids"].tolist() == [7, 8]
    assert response["generation_logprobs"].dtype == torch.float32
    assert response["generation_logprobs"].tolist() == [-0.25, -0.75]
    assert (response["role"], response["content"], response["finish_reason"]) == ("assistant", "4", "stop")
    assert observation["token_ids"].shape == (0,)
    assert "generation_logprobs" not in observation


def test_the_input_is_left_as_it_was(run: Run) -> None:
    given = batch()
    run(given)
    assert [len(log) for log in given["message_log"]] == [1, 1]
    assert "total_reward" not in given


def test_a_plain_dict_is_a_batch_too(run: Run) -> None:
    came, _ = run(dict(batch(1)))
    assert type(came) is dict


# Samples without a final reward


def test_a_sample_that_failed_raises_by_default_and_is_named(service: ScriptedService, run: Run) -> None:
    scripted(service, {}, LOST)
    with pytest.raises(RolloutsNotFinal) as raised:
        run(batch())
    assert str(raised.value) == (
        "1 of 2 rollouts have no final reward; idx 1 of task math, generation 0: timeout error: Too slow."
    )
    assert [sample.idx for sample in raised.value.samples] == [1]


def test_a_masked_sample_weighs_nothing_and_leaves_the_mean_of_its_prompt_alone(
    service: ScriptedService, run: Run
) -> None:
    scripted(service, {"total_reward": 0.5}, LOST, {"total_reward": 0.0}, {"total_reward": 8.0})
    came, _ = run(batch(prompts=[1, 1, 1, 2]), not_final="mask")
    assert came["loss_multiplier"].tolist() == [1, 0, 1, 1]
    assert came["total_reward"].tolist() == [0.5, 0.25, 0, 8]
    assert came["status"] == ["completed", "error", "completed", "completed"]


def test_a_sample_cut_off_by_the_deadline_is_masked_and_one_without_siblings_gets_nothing(
    service: ScriptedService, run: Run
) -> None:
    scripted(service, {"status": "deadline", "total_reward": 0.75})
    given = {name: column for name, column in batch(1).items() if name != "loss_multiplier"}
    came, _ = run(given, not_final="mask", deadline_s=1)
    assert came["loss_multiplier"].tolist() == [0]
    assert came["total_reward"].tolist() == [0]


# Batches that are run again


PART = {"role": "assistant", "content": "ab", "token_ids": [7, 8], "generation_logprobs": [-0.25, -0.5]}
WHOLE = {
    "role": "assistant",
    "content": "abcd",
    "token_ids": [7, 8, 9, 10],
    "generation_logprobs": [-0.25, -0.5, -0.75, -1.0],
    "finish_reason": "stop",
}
RIGHT = {"role": "environment", "content": "right", "token_ids": [11]}
CUT: Json = {"status": "deadline", "total_reward": None}


def answering_in_turn(service: ScriptedService, *logs: Callable[[list[Json]], list[Json]], **fields: Any) -> None:
    """The next answer: the log of each sample made of its posted one, by its place in the batch."""
    service.rollouts.clear()
    service.rollouts.append(
        lambda body: answer(
            *(
                result(posted["idx"], message_log=log(posted["message_log"]), **fields)
                for posted, log in zip(body["samples"], logs, strict=True)
            )
        )
    )


def cut_once(service: ScriptedService, run: Run, given: BatchedDataDict) -> Any:
    """The batch after a run in whose first response the deadline cut off every sample."""
    answering_in_turn(service, *[lambda log: [*log, PART]] * len(given["task_name"]), **CUT)
    came, _ = run(given, not_final="mask")
    return came


def test_a_response_that_was_cut_off_goes_on_as_one_message_with_all_of_its_tokens(
    service: ScriptedService, run: Run
) -> None:
    once = cut_once(service, run, batch(1))
    once["message_log"][0][-1]["token_loss_mask"] = torch.ones(2)
    once["message_log"][0][-1]["mine"] = "kept"
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


def test_tokens_that_are_generated_again_replace_those_of_before(service: ScriptedService, run: Run) -> None:
    once = cut_once(service, run, batch(1))
    again = {**WHOLE, "token_ids": [7, 9], "generation_logprobs": [-0.25, -0.125]}
    answering_in_turn(service, lambda log: [*log[:-1], again])
    [[_, response]] = run(once)[0]["message_log"]
    assert (response["token_ids"].tolist(), response["generation_logprobs"].tolist()) == ([7, 9], [-0.25, -0.125])


def test_a_cut_in_a_later_turn_keeps_the_turns_before_it(service: ScriptedService, run: Run) -> None:
    answering_in_turn(service, lambda log: [*log, {**WHOLE, "reward": 0.5}, RIGHT, PART], **CUT)
    once, _ = run(batch(1), not_final="mask")
    answering_in_turn(service, lambda log: [*log[:-1], WHOLE, RIGHT])
    twice, _ = run(once)
    [before], [after] = once["message_log"], twice["message_log"]
    assert all(old is new for old, new in zip(before[:3], after[:3], strict=True))
    assert [message["token_ids"].tolist() for message in after] == [[1, 5], [7, 8, 9, 10], [11], [7, 8, 9, 10], [11]]


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


def test_resumed_rollouts_of_one_prompt_are_one_group_wherever_they_were_cut(
    service: ScriptedService, run: Run
) -> None:
    answering_in_turn(service, lambda log: [*log, PART], lambda log: [*log, WHOLE], lambda log: log, **CUT)
    once, _ = run(batch(prompts=[1, 1, 1]), not_final="mask")
    scripted(service, {"total_reward": 1.0}, {"total_reward": 0.5}, LOST)
    twice, _ = run(once, not_final="mask")
    assert twice["total_reward"].tolist() == [1, 0.5, 0.75]


# What NeMo-RL has computed

TEMPERATURE, ROWS, NEW_TOKENS = 0.7, 32, 20
LOGITS = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 2
"""The model: the logits after each token."""


def logprobs_after(tokens: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    return (LOGITS[tokens] / temperature).log_softmax(-1)


class SamplingGenerator(ScriptedGenerator):
    """Samples from the model."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        draw = torch.Generator().manual_seed(len(self.requests))
        tokens, logprobs = [request.prompt_token_ids[-1]], list[float]()
        for _ in range(NEW_TOKENS):
            after = logprobs_after(torch.tensor(tokens[-1]))
            tokens.append(int(after.exp().multinomial(1, generator=draw)))
            logprobs.append(float(after[tokens[-1]]))
        return Generation(token_ids=tokens[1:], logprobs=logprobs, finish_reason="stop")


@pytest.fixture
def recording() -> Iterator[RolloutClient]:
    """A client of a service that keeps records and takes reports."""
    store: Any = RolloutRecordStore(RolloutRecordsSettings())
    unused: Any = None
    http = ScriptedHttp(
        RequestLimits(),
        generator=SamplingGenerator([]),
        recorder=RolloutRecorder(store),
        reports=TrainerReports(store, unused, dict),
    )
    with served(http.app) as url, RolloutClient(url) as rollout_client:
        yield rollout_client


def train_data_of(came: Any, temperature: float = TEMPERATURE) -> BatchedDataDict:
    """What NeMo-RL makes of a batch of rows of one length: its logs in a row, and the model's log-probabilities."""
    logs = [[torch.as_tensor(message["token_ids"]) for message in log] for log in came["message_log"]]
    masks = [
        torch.cat([torch.full_like(ids, message["role"] == "assistant") for ids, message in zip(*pair, strict=True)])
        for pair in zip(logs, came["message_log"], strict=True)
    ]
    input_ids = torch.nn.functional.pad(torch.stack([torch.cat(log) for log in logs]), (0, 3), value=0)
    logprobs = logprobs_after(input_ids[:, :-1], temperature).gather(2, input_ids[:, 1:, None])[..., 0]
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.tensor([sum(map(len, log)) for log in logs]),
            "prev_logprobs": torch.nn.functional.pad(logprobs, (1, 0)),
            "token_mask": torch.nn.functional.pad(torch.stack(masks), (0, 3)),
            "sample_mask": came["loss_multiplier"],
        }
    )


def right(came: Any) -> BatchedDataDict:
    return train_data_of(came)


def without_the_temperature(came: Any) -> BatchedDataDict:
    return train_data_of(came, 1.0)


def shifted(came: Any) -> BatchedDataDict:
    data = train_data_of(came)
    return BatchedDataDict(data | {"prev_logprobs": data["prev_logprobs"].roll(-1, 1)})


def with_a_mask_of_ones(came: Any) -> BatchedDataDict:
    data = train_data_of(came)
    return BatchedDataDict(data | {"token_mask": torch.ones_like(data["token_mask"])})


def with_another_template(came: Any) -> BatchedDataDict:
    rendered = [[{**log[0], "token_ids": torch.tensor([9, 9])}, *log[1:]] for log in came["message_log"]]
    return train_data_of(came | {"message_log": rendered})


@pytest.mark.parametrize(
    ("trainer", "causes"),
    [
        (right, []),
        (without_the_temperature, ["wrong_temperature"]),
        (shifted, ["misaligned"]),
        (with_a_mask_of_ones, ["missing_mask"]),
        (with_another_template, ["other_tokens"]),
    ],
)
def test_prev_logprobs_are_compared_and_each_wrong_trainer_is_told_in_which_way(
    recording: RolloutClient, trainer: Callable[[Any], BatchedDataDict], causes: list[str]
) -> None:
    came, _ = run_async_multi_turn_rollout(recording, batch(ROWS), 64, sampling={"temperature": TEMPERATURE})
    answer = report_prev_logprobs(recording, came, trainer(came))
    assert (answer.compared, answer.refused) == (ROWS, [])
    assert [cause.kind for cause in answer.causes] == causes
    is_right = trainer in (right, with_a_mask_of_ones)
    assert (answer.mean_ratio == pytest.approx(1, abs=1e-5)) is is_right
    record = recording.rollout_record(came["rollout_id"][0])
    assert record.mismatch is not None
    assert record.mismatch.tokens == NEW_TOKENS
    assert record.rollout.message_log[1].token_ids == came["message_log"][0][1]["token_ids"].tolist()


def test_rows_that_are_not_those_of_the_batch_are_refused(recording: RolloutClient) -> None:
    came, _ = run_async_multi_turn_rollout(recording, batch(2), 64, sampling={"temperature": TEMPERATURE})
    fewer = {"rollout_id": came["rollout_id"][:1]}
    with pytest.raises(ValueError, match="logprobs has 2 rows for 1 rollouts: give one for each"):
        report_prev_logprobs(recording, fewer, train_data_of(came))


def test_a_rollout_of_a_service_without_ids_is_refused(client: RolloutClient) -> None:
    came, _ = run_async_multi_turn_rollout(client, batch(1), 64)
    with pytest.raises(ValueError, match="a rollout has no rollout_id"):
        report_prev_logprobs(client, came, train_data_of(came))


def test_a_batch_with_numbers_of_numpy_and_torch_is_played_and_its_prompts_are_told_apart(
    run: Run, service: ScriptedService
) -> None:
    """Rows 0 and 1 have one prompt, as a tensor, a list of tensors; row 2 has another as an array."""
    logs = [[{"role": "user", "content": "", "token_ids": ids}] for ids in token_ids_of_three_rows()]
    batch = {
        "message_log": logs,
        "task_name": ["math"] * 3,
        "extra_env_info": [{"n": np.int64(3), "level": torch.tensor(0.5), "grid": np.eye(2, dtype=int)}] * 3,
        "stop_strings": np.array([["."], None, None], dtype=object),
    }

    def second_is_lost(body: Json) -> JSONResponse:
        first, second, third = body["samples"]
        return answer(played(first, total_reward=0.25), played(second, **LOST), played(third, total_reward=0.75))

    service.rollouts[0] = second_is_lost
    changed, _ = run(batch, not_final="mask")
    posted = service.bodies[0]["samples"]
    assert [sample["message_log"][0]["token_ids"] for sample in posted] == [[1, 2], [1, 2], [3]]
    assert posted[0]["extra_env_info"] == {"n": 3, "level": 0.5, "grid": [[1, 0], [0, 1]]}
    assert [sample.get("stop_strings") for sample in posted] == [["."], None, None]
    assert changed["total_reward"].tolist() == [0.25, 0.25, 0.75]
    assert [log[0]["token_ids"] is row[0]["token_ids"] for log, row in zip(changed["message_log"], logs, strict=True)]


def token_ids_of_three_rows() -> list[Any]:
    return [torch.tensor([1, 2]), list(torch.tensor([1, 2])), np.array([3])]


def test_what_json_does_not_have_is_named_by_its_row(run: Run) -> None:
    log = [{"role": "user", "content": "", "token_ids": torch.tensor([1])}]
    infos: list[Json] = [{}, {"handle": object()}]
    with pytest.raises(NotJson, match=r"^samples\[1\]\.extra_env_info\.handle: ") as refused:
        run({"message_log": [log, log], "task_name": ["math"] * 2, "extra_env_info": infos})
    assert refused.value.sample == 1


def test_a_response_that_may_not_be_trained_is_none_of_the_assistant_and_is_posted_as_one(
    service: ScriptedService, run: Run
) -> None:
    forced = {**WHOLE, "constrained": True}
    greedy = {**WHOLE, "sampled_with": {"temperature": 0.0}}
    answering_in_turn(service, lambda log: [*log, forced, RIGHT, greedy, RIGHT, PART], **CUT)
    once, _ = run(batch(1), not_final="mask")
    [log] = once["message_log"]
    assert [message["role"] for message in log] == [
        "user",
        "environment",
        "environment",
        "environment",
        "environment",
        "assistant",
    ]
    answering_in_turn(service, lambda log: [*log[:-1], WHOLE], total_reward=1.0)
    run(once)
    posted = service.bodies[1]["samples"][0]["message_log"]
    assert [message["role"] for message in posted] == [
        "user",
        "assistant",
        "environment",
        "assistant",
        "environment",
        "assistant",
    ]
    assert (posted[1]["constrained"], posted[3]["sampled_with"]["temperature"]) == (True, 0.0)
