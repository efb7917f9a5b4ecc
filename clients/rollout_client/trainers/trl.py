"""The service as the `rollout_func` of TRL's `GRPOTrainer` (1.16). Needs the extra `trl`.

    trainer = GRPOTrainer(
        model, args=args, train_dataset=dataset,
        reward_funcs=service_reward, rollout_func=ServiceRolloutFunc(client, task_name="math"),
    )

The dataset has a column `prompt` and the columns that its task needs: `extra_env_info` (or the columns that make it up,
see `RowReader`), and `task_name` where there are several tasks. TRL gives a `rollout_func` only the prompts, so the
other columns are looked up by the prompt.

`push_from_trainer` pushes the weights of any transformers `Trainer`, sharded ones included.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Unpack, cast

from accelerate.utils import DistributedType, broadcast_object_list  # type: ignore[import-untyped]

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.calls.sync_client.pusher import PolicyPusher
from rollout_client.contract.messages import JsonObject
from rollout_client.contract.policy import PushResult
from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import RolloutError
from rollout_client.results import final_reward, last_finish_reason, token_row
from rollout_client.trainers.dataset_rows import (
    GenerationOptions,
    Prompt,
    RowReader,
    fields_by_prompt,
    messages_of,
    prompt_key,
    sampling_fields,
)
from rollout_client.turn_rewards import turn_rewards
from rollout_client.weights.torch_tensors import GatheredState

SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP}


class WeightsNotPushed(RolloutError):
    """The main process of the trainer could not push its weights; every other process raises this error."""


def push_from_trainer(pusher: PolicyPusher, trainer: Any, policy_name: str | None = None) -> int:
    """Pushes the weights from the trainer's main process and returns their version on every process.

    For a PEFT model it pushes the active adapter; the service's full weights must be those under the adapter. For any
    other model it pushes full weights the first time and where they are smaller, and otherwise a delta; the main
    process keeps a copy.

    Every process of the trainer must call it: sharded weights (FSDP, DeepSpeed) are gathered by all of them.

    Args:
        policy_name: the named policy that an adapter becomes a version of.

    Raises:
        ValueError: the weights do not fit the service's model, an adapter is sharded, or other weights have a name.
        RolloutError: the push failed. Only the main process raises the cause itself, which may be any exception.
        WeightsNotPushed: on every other process, whatever the cause, unless it has failed itself.
    """
    outcome: list[int | str] = [0]
    failure: BaseException | None = None
    try:
        push = _push_of(pusher, trainer, policy_name)
        if trainer.accelerator.is_main_process:
            outcome = [push().version]
    except BaseException as error:  # noqa: BLE001 - the others wait in the broadcast, whatever has happened here
        outcome, failure = [str(error) or type(error).__name__], error
    [version_or_reason] = broadcast_object_list(outcome, from_process=0)
    if failure is not None:
        raise failure
    if isinstance(version_or_reason, str):
        raise WeightsNotPushed(f"The main process could not push the weights: {version_or_reason}")
    return int(version_or_reason)


def _push_of(pusher: PolicyPusher, trainer: Any, policy_name: str | None) -> Callable[[], PushResult]:
    """The push that the main process calls. Raises `ValueError` as `push_from_trainer` does."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_sharded = trainer.accelerator.distributed_type in SHARDED
    if not hasattr(model, "peft_config"):
        if policy_name is not None:
            raise ValueError(f"policy_name={policy_name}: a named policy is an adapter, and the trainer trains none.")
        if is_sharded:
            # All processes gather its state dict together.
            return partial(pusher.push, GatheredState(model, trainer.accelerator.get_state_dict(trainer.model_wrapped)))
        return partial(pusher.push, model)
    if is_sharded:
        raise ValueError(
            "The trainer trains a PEFT adapter whose weights are sharded over processes, which is not pushed from "
            "here: pass push=False, save the adapter at the end of each step, and push its folder."
        )
    return partial(pusher.client.push_weights, model, kind="adapter", name=policy_name)


FieldsOf = Callable[[Prompt], Mapping[str, Any]]
MASKED_LOGPROB = 0.0


class TrainerOptions(GenerationOptions, total=False):
    """Fields of the request that a trainer's arguments do not set; as in `RolloutOptions`."""

    max_seq_len: int | None
    """Limit in tokens: prompt, generations and observations together."""
    max_rollout_turns: int | None


class RolloutFuncOptions(TrainerOptions, total=False):
    """Options of every `rollout_func` of the service."""

    task_name: str | None
    """See `RowReader`."""
    env_columns: Sequence[str]
    """See `RowReader`."""
    fields_of: FieldsOf | None
    """Returns all fields of a sample except its prompt (`task_name`, `extra_env_info`, ...). It is needed where the
    prompt does not identify the row: for streamed datasets, and for equal prompts of different rows."""
    push: bool
    """Push the weights, by default; without it the caller does."""
    policy_name: str | None
    """The named policy that the adapter of a PEFT model becomes, beside those of other trainers."""
    check_tokenizer: bool
    """At the first call, check that the trainer's tokenizer makes the service's tokens; by default it is checked."""


class ServiceRolloutFunc:
    """Plays one rollout per prompt of the trainer, with the trainer's current weights.

    If the trainer has made a step since the last call, its weights are pushed first, as by `push_from_trainer`: TRL
    without `use_vllm` sends them nowhere. A PEFT model needs a service with `enable_lora`. The rollouts then require
    the pushed version. Temperature, top-p, top-k, min-p and `max_completion_length` are the trainer's; the last one
    limits each generation, not the whole completion.

    Args:
        client: the caller owns it and closes it.
        options: those of the adapter, and fields of the request that the trainer's arguments do not set.
    """

    def __init__(self, client: RolloutClient, **options: Unpack[RolloutFuncOptions]) -> None:
        self._client = client
        self.pusher = PolicyPusher(client)
        """For further pushes of the trainer's weights: after one by another pusher, the next is of full weights."""
        self._must_check_tokenizer = options.pop("check_tokenizer", True)
        self._reader = RowReader(options.pop("task_name", None), options.pop("env_columns", ()))
        self._fields_of = options.pop("fields_of", None)
        self._push = options.pop("push", True)
        self._policy_name = options.pop("policy_name", None)
        self._options: TrainerOptions = options
        self._found: dict[bool, dict[str, JsonObject]] = {}
        self._pushed: tuple[int, int] | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """The columns that TRL expects, one entry per prompt, in order.

        `prompt_ids`; `completion_ids`, from the first generated token to the last; `logprobs` and `env_mask` (1 for a
        generated token that may be trained), both as long as the completion; and for the reward functions
        `total_reward` (float or None), `rewards`, `turn_rewards` (one for each response that may be trained; they sum
        to the total), `status`, `answer`, `finish_reason` (of the last response: `stop` or `length`) and `rollout_id`.
        A rollout that failed or was cut off has the reward None, which TRL leaves out of its group's statistics, and an
        `env_mask` of zeros.

        Raises:
            TokenizerDiffers: the trainer's tokenizer makes other tokens than the service's.
            RolloutError: the service cannot be reached or refuses the request.
            ValueError: the service does not support one of the trainer's arguments, a prompt is not in the dataset or
                shows images, or a rollout does.
        """
        tokenizer = trainer.processing_class
        # First of all: a trainer whose prompts show images has a processor in the place of a tokenizer.
        samples = [
            {**self._fields(prompt, trainer), **self._prompt_fields(prompt, tokenizer), "idx": place}
            for place, prompt in enumerate(prompts)
        ]
        if self._must_check_tokenizer:
            self._client.check_tokenizer(tokenizer)
            self._must_check_tokenizer = False
        options = rollout_options(trainer.args, self._options)
        policy = {} if self._policy_name is None else {"name": self._policy_name}
        if self._push:
            options["policy"] = {**policy, "min_version": self._version(trainer)}
        elif policy:
            options["policy"] = policy
        return _columns_of(*self._played(samples, options), tokenizer.pad_token_id)

    def _prompt_fields(self, prompt: Prompt, tokenizer: Any) -> JsonObject:
        """Chat messages are posted as they are, for the service's chat template; text is tokenized here, as in TRL."""
        if not isinstance(prompt, str):
            return {"messages": cast(Any, messages_of(prompt))}
        token_ids = list(tokenizer(text=prompt)["input_ids"])
        return {"message_log": [{"role": "user", "content": prompt, "token_ids": token_ids}]}

    def _played(
        self, samples: list[JsonObject], options: RolloutOptions
    ) -> tuple[Sequence[SampleResult], list[float | None]]:
        """The rollouts of the samples, and their rewards; None where a reward is not final."""
        played = self._client.rollout(samples, **options).samples
        return played, [final_reward(sample) for sample in played]

    def _version(self, trainer: Any) -> int:
        """The service's version of the trainer's weights; pushes them if the trainer has made a step since."""
        step = trainer.state.global_step
        if self._pushed is None or self._pushed[0] != step:
            self._pushed = (step, push_from_trainer(self.pusher, trainer, self._policy_name))
        return self._pushed[1]

    def _fields(self, prompt: Prompt, trainer: Any) -> Mapping[str, Any]:
        if self._fields_of is not None:
            return self._fields_of(prompt)
        is_training = trainer.model.training
        if is_training not in self._found:
            dataset = trainer.train_dataset if is_training else trainer.eval_dataset
            self._found[is_training] = fields_by_prompt(_dataset_rows(dataset), self._reader)
        try:
            return self._found[is_training][key := prompt_key(prompt)]
        except KeyError:
            raise ValueError(
                f"A prompt of the trainer is not in its dataset: {key[:200]}. Give the adapter fields_of."
            ) from None


def service_reward(
    *,
    total_reward: list[float | None],
    rewards: Sequence[Mapping[str, float]] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_columns: Any,
) -> list[float | None]:
    """A reward function of the trainer: the environments' rewards, None for a rollout without a final reward.

    Into the trainer's log goes the mean of each named reward, as `rewards/NAME/mean`.
    """
    if log_metric is not None and rewards is not None:
        finals = [named for named, total in zip(rewards, total_reward, strict=True) if total is not None]
        for name in sorted({name for named in finals for name in named}):
            of_name = [named[name] for named in finals if name in named]
            log_metric(f"rewards/{name}/mean", sum(of_name) / len(of_name))
    return total_reward


def _dataset_rows(dataset: Any) -> Any:
    """The rows of a dataset, or of every dataset of a dict; raises `ValueError` for a streamed dataset."""
    if isinstance(dataset, Mapping):
        return chain.from_iterable(_dataset_rows(each) for each in dataset.values())
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "The dataset is streamed, so its rows cannot be found by their prompt: give the adapter fields_of."
        )
    return dataset


def rollout_options(args: Any, given: TrainerOptions) -> RolloutOptions:
    """The options of a rollout request from a trainer's arguments; those in `given` replace them.

    Raises:
        ValueError: an argument changes the sampling in a way that the service does not support.
    """
    if args.repetition_penalty != 1.0:
        raise ValueError(f"The service has no repetition penalty, and repetition_penalty is {args.repetition_penalty}.")
    if unknown := getattr(args, "generation_kwargs", None):
        raise ValueError(f"The service supports no generation_kwargs, and they are {unknown}; pass sampling.")
    sampling: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "max_new_tokens": args.max_completion_length,
    }
    sampling |= sampling_fields(given)
    template = given.get("chat_template_kwargs") or args.chat_template_kwargs or None
    return {**cast(RolloutOptions, given), "sampling": sampling, "chat_template_kwargs": template}


def _columns_of(samples: Sequence[SampleResult], rewards: list[float | None], filler_id: int) -> dict[str, list[Any]]:
    """The columns of `ServiceRolloutFunc`. TRL forbids empty lists: one masked `filler_id` replaces an empty one."""
    rows = [token_row(sample).without_tail() for sample in samples]
    return {
        "prompt_ids": [row.token_ids[: row.prompt_length] or [filler_id] for row in rows],
        "completion_ids": [row.token_ids[row.prompt_length :] or [filler_id] for row in rows],
        "logprobs": [row.generation_logprobs[row.prompt_length :] or [MASKED_LOGPROB] for row in rows],
        "env_mask": [
            [0 if reward is None else trained for trained in row.loss_mask[row.prompt_length :] or [0]]
            for row, reward in zip(rows, rewards, strict=True)
        ],
        "total_reward": rewards,
        "rewards": [sample.rewards for sample in samples],
        "status": [sample.status for sample in samples],
        "answer": [sample.answer for sample in samples],
        "finish_reason": [last_finish_reason(sample) for sample in samples],
        "turn_rewards": [turn_rewards(sample, reward) for sample, reward in zip(samples, rewards, strict=True)],
        "rollout_id": [sample.rollout_id for sample in samples],
    }
