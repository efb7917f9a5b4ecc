"""NeMo-RL's rollout functions, played by the service. Needs the extra `torch`; NeMo-RL is not imported.

`run_multi_turn_rollout` and `run_async_multi_turn_rollout` replace the functions of the same names in
`nemo_rl/experience/rollouts.py` (v0.3.0): they take the same batches and return the same batches and metrics. The
client replaces the arguments policy, tokenizer and environments; `sampling` replaces the policy's generation config.

They take no tokenizer, because they tokenize nothing: check yours once with `client.check_tokenizer(tokenizer)`.

They differ from NeMo-RL where the service does (its documentation lists how), and in three more points: the input batch
is not changed, `idx` is returned, and turns that are already in a posted log count towards `max_rollout_turns`.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, TypeVar, Unpack, cast

import torch

from rollout_client.calls.json_values import json_value
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.contract.base import PolicyDemand
from rollout_client.contract.messages import GivenMessage, JsonObject, Message, may_be_trained
from rollout_client.contract.records import ReportAnswer
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import RolloutsNotFinal, filled_in, final_reward
from rollout_client.tensors.rollout_tensors import unpadded
from rollout_client.trainers.dataset_rows import GenerationOptions, sampling_fields

Batch = TypeVar("Batch", bound=Mapping[str, Any])
NotFinal = Literal["raise", "mask"]
MESSAGE_TENSORS = {"token_ids": torch.int64, "generation_logprobs": torch.float32}
UNTRAINED_ROLE = "environment"
POSTED_FIELDS = tuple(GivenMessage.model_fields)
MASKED_LOSS_MULTIPLIER = "masked_loss_multiplier"
"""Column of the values that `not_final="mask"` took from `loss_multiplier`; another run restores them."""


class ServiceOptions(GenerationOptions, total=False):
    """Fields of the request that NeMo-RL's arguments do not set. `observation_format` is `raw` by default, as there."""

    policy: PolicyDemand | Mapping[str, Any] | None


def run_multi_turn_rollout(
    client: RolloutClient,
    input_batch: Batch,
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    *,
    not_final: NotFinal = "raise",
    schedule: Literal["async", "lockstep"] = "lockstep",
    **options: Unpack[ServiceOptions],
) -> tuple[Batch, dict[str, Any]]:
    """Plays the batch in lockstep: in each turn all samples generate, then all environments step.

    Args:
        client: of a service that has the tasks of the batch.
        input_batch: `message_log` (per sample a list of messages, each with `role`, `content` and the tensor
            `token_ids`), `extra_env_info`, `task_name`, and optionally `stop_strings`, `loss_multiplier` and any other
            fields; all of one length. `extra_env_info` must be JSON, but for numbers and arrays of numpy and torch.
        max_seq_len: limit of one sample in tokens: prompt, generations and observations together.
        max_rollout_turns: limit of one sample in generations.
        schedule: `async` as `run_async_multi_turn_rollout` has it.
        greedy: take the most likely token at each step.
        not_final: treatment of samples that failed or that `deadline_s` cut off; NeMo-RL has no such samples.
            `raise` raises `RolloutsNotFinal`. `mask` sets their `loss_multiplier` to 0, and their `total_reward` to the
            mean of the final rewards of the same prompt, so that the baseline of the group does not change; to 0 where
            the prompt has no final reward. The batch can be run again: samples that were cut off continue; those that
            then have a final reward get their `loss_multiplier` back.

    Returns:
        A batch of the class of `input_batch`, and the metrics under NeMo-RL's names. In the batch: `message_log`, whose
        new messages have the 1-D tensors `token_ids` (int64) and, where generated, `generation_logprobs` (float32), and
        the role `environment` where they were generated and may not be trained; a
        posted message that the service went on with is a new one; `extra_env_info`; `total_reward` (float32 [B]),
        without the rewards of posted messages; `truncated` (bool [B]); `status` and `rollout_id` (lists of str); with
        `mask`, `loss_multiplier` and `masked_loss_multiplier` (float32 [B]); every other field unchanged.

    Raises:
        RolloutError: the service cannot be reached or refuses the request.
        RolloutsNotFinal: see `not_final`.
        ValueError: `history` is `template`.
        NotJson: the batch holds a value that is not JSON; it names the row and the field.
    """
    if options.get("history") == "template":
        raise ValueError("history 'template' leaves logs, and a batch of NeMo-RL has one for each sample: leave it out")
    given: RolloutOptions = {
        **cast(RolloutOptions, options),
        "sampling": sampling_fields(options) | ({"greedy": True} if greedy else {}),
        "max_seq_len": max_seq_len,
        "max_rollout_turns": max_rollout_turns,
        "schedule": schedule,
    }
    response = client.rollout(_samples_of(input_batch), **given)
    rewards = [final_reward(sample) for sample in response.samples]
    lost = [sample for sample, reward in zip(response.samples, rewards, strict=True) if reward is None]
    if lost and not_final == "raise":
        raise RolloutsNotFinal(lost, len(rewards))
    changed = _changed_fields(input_batch, response.samples, rewards, not_final)
    batch_class = cast(Any, type(input_batch))
    return batch_class({**input_batch, **changed}), dict(response.metrics)


def run_async_multi_turn_rollout(
    client: RolloutClient, input_batch: Batch, *limits: Any, **options: Any
) -> tuple[Batch, dict[str, Any]]:
    """`run_multi_turn_rollout` with its arguments, but no sample waits for another within a turn.

    Returns when all samples have ended.
    """
    return run_multi_turn_rollout(client, input_batch, *limits, schedule="async", **options)


def report_prev_logprobs(
    client: RolloutClient, batch: Mapping[str, Any], train_data: Mapping[str, Any]
) -> ReportAnswer:
    """Tells the service which log-probabilities NeMo-RL has computed for a batch of these functions.

    To be called once `prev_logprobs` are in `train_data`, whose rows are those of the batch. NeMo-RL computes them with
    the weights before the update, at the temperature of its generation config.

    Args:
        batch: as the rollout functions have returned it, with `rollout_id`.
        train_data: `input_ids`, `prev_logprobs` and `token_mask` [B, S], padded on the right; `input_lengths` [B]; and
            `sample_mask` [B] if there is one. The log-probability of a token stands at its own place.

    Returns:
        The mean and largest ratio of the probabilities, and what makes them part.

    Raises:
        RolloutError: the service cannot be reached, or keeps no records of rollouts.
        ValueError: there are other rows than in the batch, or a row has no `rollout_id`.
    """
    input_ids = train_data["input_ids"]
    is_token = torch.arange(input_ids.shape[1]) < torch.as_tensor(train_data["input_lengths"]).cpu()[:, None]
    weights = train_data.get("sample_mask")
    mask = train_data["token_mask"] if weights is None else train_data["token_mask"] * weights[:, None]
    return client.report_logprobs(
        batch["rollout_id"],
        unpadded(train_data["prev_logprobs"], is_token),
        masks=unpadded(mask, is_token),
        token_ids=unpadded(input_ids, is_token),
    )


def _samples_of(batch: Mapping[str, Any]) -> list[JsonObject]:
    """The samples to post, one per row. Other fields of the batch are not sent: they are not changed either."""
    stop_strings = batch.get("stop_strings")
    if stop_strings is None or not len(stop_strings):
        stop_strings = [None] * len(batch["message_log"])
    columns = (batch["message_log"], batch["task_name"], batch["extra_env_info"], stop_strings)
    return [
        {
            "idx": place,
            "task_name": task_name,
            "message_log": [_posted_fields(message) for message in message_log],
            "extra_env_info": extra_env_info or {},
            **({} if stops is None else {"stop_strings": stops}),
        }
        for place, (message_log, task_name, extra_env_info, stops) in enumerate(zip(*columns, strict=True))
    ]


def _posted_fields(message: Mapping[str, Any]) -> JsonObject:
    fields = {name: message[name] for name in POSTED_FIELDS if message.get(name) is not None}
    return fields | ({"role": "assistant"} if _is_response(message) else {})


def _is_response(message: Mapping[str, Any]) -> bool:
    """Whether the policy generated the message. NeMo-RL itself gives log-probabilities to all, of 0."""
    is_left_out = message.get("generation_logprobs") is not None and not may_be_trained(message)
    return is_left_out or (message["role"] == "assistant" and "generation_logprobs" in message)


def _changed_fields(
    batch: Mapping[str, Any], samples: Sequence[SampleResult], rewards: Sequence[float | None], not_final: NotFinal
) -> dict[str, Any]:
    logs = batch["message_log"]
    prompts = list(map(_prompt_tokens, logs))
    changed = {
        "message_log": [_merged_log(log, sample.message_log) for log, sample in zip(logs, samples, strict=True)],
        "extra_env_info": [sample.extra_env_info for sample in samples],
        "total_reward": torch.tensor(filled_in(rewards, prompts, 0.0), dtype=torch.float32),
        "truncated": torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
        "status": [sample.status for sample in samples],
        "rollout_id": [sample.rollout_id for sample in samples],
    }
    if not_final == "mask" or MASKED_LOSS_MULTIPLIER in batch:
        # The multipliers are 0 for samples without a final reward; those that these had before are kept beside them.
        multiplier, masked = batch.get("loss_multiplier"), batch.get(MASKED_LOSS_MULTIPLIER)
        given = torch.as_tensor([1.0] * len(rewards) if multiplier is None else multiplier)
        given = given if masked is None else given + torch.as_tensor(masked)
        is_final = torch.tensor([reward is not None for reward in rewards])
        changed |= {"loss_multiplier": given * is_final, MASKED_LOSS_MULTIPLIER: given * ~is_final}
    return changed


def _merged_log(posted: Sequence[Mapping[str, Any]], returned: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The posted messages, then the new ones.

    The service continues the last message if its generation was interrupted, and rewards it if only its step was
    missing. It then comes back whole, and replaces the posted one.
    """
    if len(returned) < len(posted):
        return list(posted)
    *before, last = posted
    came, *new = map(_message_of, returned[len(before) :])
    if json_value(_posted_fields(last)) != json_value(_posted_fields(came)):
        last = {name: value for name, value in last.items() if not isinstance(value, torch.Tensor)} | came
    return [*before, last, *new]


def _message_of(message: Message) -> dict[str, Any]:
    """The message in NeMo-RL's form, with finish reason, weight versions and reward if the service sent them.

    NeMo-RL trains on all messages of the assistant: a response that may not be trained has another role there."""
    fields = message.model_dump(exclude_none=True)
    if message.generation_logprobs is not None and not may_be_trained(message):
        fields["role"] = UNTRAINED_ROLE
    return fields | {
        name: torch.tensor(fields[name], dtype=dtype) for name, dtype in MESSAGE_TENSORS.items() if name in fields
    }


def _prompt_tokens(log: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Tokens before the first response, which the rollouts of one prompt share even when they are resumed."""
    prompt = takewhile(lambda message: not _is_response(message), log)
    return tuple(token for message in prompt for token in json_value(message["token_ids"]))
