"""The rollout functions of NeMo-RL, played by the service. Needs the extra `torch`; NeMo-RL itself is not imported.

Stand-ins for `run_multi_turn_rollout` and `run_async_multi_turn_rollout` of `nemo_rl/experience/rollouts.py` (v0.3.0):
the same batches in, the same batches and metrics out. A client stands where policy, tokenizer and environments stood;
what was the policy's generation config is `sampling`.

They depart from it in what the service does (see its README), and in this: the input batch is left as it is, `idx`
comes back, and turns that a posted log brought along count towards `max_rollout_turns`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import torch

from rollout_client.client import RolloutClient
from rollout_client.contract import JsonObject, Message, ObservationFormat, PolicyDemand, SampleResult, Sampling
from rollout_client.rollout_calls import RolloutOptions
from rollout_client.trainers.rows import RolloutsNotFinal, final_reward

Batch = TypeVar("Batch", bound=Mapping[str, Any])
NotFinal = Literal["raise", "mask"]
TENSORS_OF_MESSAGES = {"token_ids": torch.int64, "generation_logprobs": torch.float32}
SENT_OF_MESSAGES = ("role", "content", "token_ids", "generation_logprobs", "finish_reason", "weight_versions", "reward")


class ServiceOptions(TypedDict, total=False):
    """What the service can be asked for beside NeMo-RL's own arguments; as in `RolloutOptions`."""

    sampling: Sampling | Mapping[str, Any] | None
    observation_format: ObservationFormat | None
    """By default `raw`, as in NeMo-RL."""
    chat_template_kwargs: Mapping[str, Any] | None
    deadline_s: float | None
    retries: int | None
    policy: PolicyDemand | Mapping[str, Any] | None


def run_multi_turn_rollout(
    client: RolloutClient,
    input_batch: Batch,
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    *,
    not_final: NotFinal = "raise",
    **options: Unpack[ServiceOptions],
) -> tuple[Batch, dict[str, Any]]:
    """Plays the batch in lockstep: all samples generate, then all step.

    Args:
        client: of the service that knows the tasks of the batch.
        input_batch: `message_log` (a list of messages a sample, each with `role`, `content` and the tensor
            `token_ids`), `extra_env_info`, `task_name` and optionally `stop_strings`, `loss_multiplier` and any further
            fields, all of one length. `extra_env_info` must be JSON.
        max_seq_len: in tokens: prompt, generations and observations together.
        max_rollout_turns: generations of one sample.
        greedy: the most likely token each time.
        not_final: what becomes of samples that failed or that `deadline_s` cut off, of which NeMo-RL knows none.
            `raise` raises `RolloutsNotFinal`. `mask` sets their `loss_multiplier` to 0 and their `total_reward` to the
            mean of the samples with the same prompt that have one, so that the baseline of their group stays what it
            would be without them; it is 0 where there is none.

    Returns:
        A batch of the class of `input_batch`: `message_log` (new messages with `token_ids` int64 and, where generated,
        `generation_logprobs` float32, of one dimension), `extra_env_info`, `total_reward` (float32 [B]), `truncated`
        (bool [B]), `status` (list of str), every other field as it was. And the metrics, under NeMo-RL's names.

    Raises a `RolloutError` if the service does not answer or refuses, `ValueError` if the batch holds what is no JSON.
    """
    return played(client, input_batch, not_final, limits(max_seq_len, max_rollout_turns, "lockstep", greedy, options))


def run_async_multi_turn_rollout(
    client: RolloutClient,
    input_batch: Batch,
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    *,
    not_final: NotFinal = "raise",
    **options: Unpack[ServiceOptions],
) -> tuple[Batch, dict[str, Any]]:
    """`run_multi_turn_rollout`, but no sample waits for a slower one. It returns when all have ended, as in NeMo-RL."""
    return played(client, input_batch, not_final, limits(max_seq_len, max_rollout_turns, "async", greedy, options))


def limits(
    max_seq_len: int,
    max_rollout_turns: int,
    schedule: Literal["async", "lockstep"],
    greedy: bool,
    options: ServiceOptions,
) -> RolloutOptions:
    given = options.get("sampling") or {}
    sampling = given.model_dump(exclude_unset=True) if isinstance(given, Sampling) else dict(given)
    return {
        **cast(RolloutOptions, options),
        "sampling": sampling | ({"greedy": True} if greedy else {}),
        "max_seq_len": max_seq_len,
        "max_rollout_turns": max_rollout_turns,
        "schedule": schedule,
    }


def played(
    client: RolloutClient, input_batch: Batch, not_final: NotFinal, options: RolloutOptions
) -> tuple[Batch, dict[str, Any]]:
    response = client.rollout(samples_of(input_batch), **options)
    rewards = [final_reward(sample) for sample in response.samples]
    lost = [sample for sample, reward in zip(response.samples, rewards, strict=True) if reward is None]
    if lost and not_final == "raise":
        raise RolloutsNotFinal(lost, len(rewards))
    changed = changed_fields(input_batch, response.samples, rewards)
    batch_class = cast(Any, type(input_batch))
    return batch_class({**input_batch, **changed}), dict(response.metrics)


def samples_of(batch: Mapping[str, Any]) -> list[JsonObject]:
    """The rows of the batch as samples to post; what they need not say stays behind."""
    stop_strings = batch.get("stop_strings") or [None] * len(batch["message_log"])
    columns = (batch["message_log"], batch["task_name"], batch["extra_env_info"], stop_strings)
    return [
        {
            "idx": place,
            "task_name": task_name,
            "message_log": [sent_message(message) for message in message_log],
            "extra_env_info": extra_env_info or {},
            **({} if stops is None else {"stop_strings": stops}),
        }
        for place, (message_log, task_name, extra_env_info, stops) in enumerate(zip(*columns, strict=True))
    ]


def sent_message(message: Mapping[str, Any]) -> JsonObject:
    return {name: as_json(message[name]) for name in SENT_OF_MESSAGES if message.get(name) is not None}


def as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def changed_fields(
    batch: Mapping[str, Any], samples: Sequence[SampleResult], rewards: Sequence[float | None]
) -> dict[str, Any]:
    prompts = batch["message_log"]
    changed = {
        "message_log": [
            [*prompt, *map(message_of, sample.message_log[len(prompt) :])]
            for prompt, sample in zip(prompts, samples, strict=True)
        ],
        "extra_env_info": [sample.extra_env_info for sample in samples],
        "total_reward": torch.tensor(filled_in(rewards, prompts), dtype=torch.float32),
        "truncated": torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
        "status": [sample.status for sample in samples],
    }
    if None in rewards:
        changed["loss_multiplier"] = masked(batch.get("loss_multiplier"), rewards)
    return changed


def message_of(message: Message) -> dict[str, Any]:
    """As NeMo-RL has it, with finish reason, weight versions and reward beside, where the service says them."""
    said = message.model_dump(exclude_none=True)
    return said | {
        name: torch.tensor(said[name], dtype=kind) for name, kind in TENSORS_OF_MESSAGES.items() if name in said
    }


def filled_in(rewards: Sequence[float | None], prompts: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """The rewards, those that are missing filled in by the mean of the ones with the same prompt, or 0."""
    keys = [tuple(token for message in prompt for token in as_json(message["token_ids"])) for prompt in prompts]
    known = defaultdict(list)
    for key, reward in zip(keys, rewards, strict=True):
        if reward is not None:
            known[key].append(reward)
    means = {key: sum(found) / len(found) for key, found in known.items()}
    return [means.get(key, 0.0) if reward is None else reward for key, reward in zip(keys, rewards, strict=True)]


def masked(loss_multiplier: torch.Tensor | Sequence[float] | None, rewards: Sequence[float | None]) -> torch.Tensor:
    given = [1.0] * len(rewards) if loss_multiplier is None else loss_multiplier
    return torch.as_tensor(given) * torch.tensor([reward is not None for reward in rewards])
