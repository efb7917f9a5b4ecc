"""The service as the `rollout_func` of TRL's `GRPOTrainer` (1.16). Needs the extra `trl`.

    trainer = GRPOTrainer(
        model, args=args, train_dataset=dataset,
        reward_funcs=service_reward, rollout_func=ServiceRolloutFunc(client, task_name="math"),
    )

The dataset has a column `prompt` and, beside it, what the task needs: `extra_env_info` (or the columns that make it
up, see `RowReader`) and `task_name`, if there are several tasks. TRL hands a `rollout_func` prompts and nothing else,
so the rest is found by the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict, Unpack, cast

from rollout_client.client import RolloutClient
from rollout_client.contract import JsonObject, ObservationFormat, SampleResult, Sampling
from rollout_client.rollout_calls import RolloutOptions
from rollout_client.trainers.prompts import Prompt, RowReader, fields_by_prompt, messages_of, prompt_key
from rollout_client.trainers.rows import TokenRow, final_reward, token_row
from rollout_client.trainers.weights import push_from_trainer

FieldsOf = Callable[[Prompt], Mapping[str, Any]]
MASKED_LOGPROB = 0.0


class TrainerOptions(TypedDict, total=False):
    """What a trainer's own arguments leave open; as in `RolloutOptions`."""

    sampling: Sampling | Mapping[str, Any] | None
    """In place of what the trainer's arguments say, field by field."""
    max_seq_len: int | None
    """In tokens: prompt, generations and observations together."""
    max_rollout_turns: int | None
    observation_format: ObservationFormat | None
    chat_template_kwargs: Mapping[str, Any] | None
    deadline_s: float | None
    retries: int | None


class ServiceRolloutFunc:
    """Plays the trainer's prompts at the service, one rollout a prompt, and keeps the service's weights up to date.

    Whenever the trainer has stepped since the last call, its weights are pushed first, and the rollouts demand them:
    without `use_vllm`, TRL sends its weights nowhere. Temperature, top-p, top-k, min-p and `max_completion_length`,
    here the limit of one generation, are the trainer's.

    Args:
        client: of the service; its `close` stays with the caller.
        task_name, env_columns: see `RowReader`.
        fields_of: gives what a sample has beside its prompt (`task_name`, `extra_env_info`, ...), for datasets whose
            rows cannot be found by their prompt: streamed ones, and ones with equal prompts for different problems.
        push: whether the weights are pushed.
        options: what the trainer's arguments leave open.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        task_name: str | None = None,
        env_columns: Sequence[str] = (),
        fields_of: FieldsOf | None = None,
        push: bool = True,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._client = client
        self._reader = RowReader(task_name, env_columns)
        self._fields_of = fields_of
        self._push = push
        self._options = options
        self._found: dict[bool, dict[str, JsonObject]] = {}
        self._pushed: tuple[int, int] | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """The columns that TRL asks for, a row for each of `prompts`, in order.

        `prompt_ids`, `completion_ids` (everything from the first generated token to the last), `logprobs` and
        `env_mask` (both of the completion's length; 1 for a generated token), and for the reward functions
        `total_reward` (float or None), `rewards`, `status` and `answer`. A rollout that failed or was cut off has a
        reward of None, which TRL keeps out of its group's statistics, and an `env_mask` of 0.

        Raises a `RolloutError` if the service does not answer or refuses, `ValueError` for arguments of the trainer
        that the service does not know and for prompts that are not in its dataset.
        """
        tokenizer = trainer.processing_class
        samples = [
            {**self._fields(prompt, trainer), **prompt_fields(prompt, tokenizer), "idx": place}
            for place, prompt in enumerate(prompts)
        ]
        options = rollout_options(trainer.args, self._options)
        if self._push:
            options["policy"] = {"min_version": self._version(trainer)}
        response = self._client.rollout(samples, **options)
        return completion_columns(response.samples, tokenizer.pad_token_id)

    def _version(self, trainer: Any) -> int:
        """The version that the trainer's weights have at the service, after pushing them if they are newer."""
        step = trainer.state.global_step
        if self._pushed is None or self._pushed[0] != step:
            self._pushed = (step, push_from_trainer(self._client, trainer))
        return self._pushed[1]

    def _fields(self, prompt: Prompt, trainer: Any) -> Mapping[str, Any]:
        if self._fields_of is not None:
            return self._fields_of(prompt)
        is_training = trainer.model.training
        if is_training not in self._found:
            dataset = trainer.train_dataset if is_training else trainer.eval_dataset
            self._found[is_training] = fields_by_prompt(rows_of(dataset), self._reader)
        try:
            return self._found[is_training][key := prompt_key(prompt)]
        except KeyError:
            raise ValueError(
                f"A prompt of the trainer is not in its dataset: {key[:200]}. Give the adapter fields_of."
            ) from None


def service_reward(*, total_reward: list[float | None], **_columns: Any) -> list[float | None]:
    """The environments' rewards, as a reward function of the trainer; None for a rollout without a final one."""
    return total_reward


def rows_of(dataset: Any) -> Any:
    """The rows of a dataset, or of all datasets of a dict; raises `ValueError` for one that is streamed."""
    if isinstance(dataset, Mapping):
        return chain.from_iterable(rows_of(each) for each in dataset.values())
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "The dataset is streamed, so its rows cannot be found by their prompt: give the adapter fields_of."
        )
    return dataset


def prompt_fields(prompt: Prompt, tokenizer: Any) -> JsonObject:
    """Chat messages are left to the service's template; text is tokenized here, as TRL does."""
    if not isinstance(prompt, str):
        return {"messages": cast(Any, messages_of(prompt))}
    return {
        "message_log": [{"role": "user", "content": prompt, "token_ids": list(tokenizer(text=prompt)["input_ids"])}]
    }


def rollout_options(args: Any, given: TrainerOptions) -> RolloutOptions:
    """What the arguments of a trainer say of its rollouts, where `given` does not say otherwise.

    Raises `ValueError` for arguments that change what is sampled in a way the service does not know.
    """
    if args.repetition_penalty != 1.0:
        raise ValueError(f"The service has no repetition penalty, and repetition_penalty is {args.repetition_penalty}.")
    if unknown := getattr(args, "generation_kwargs", None):
        raise ValueError(f"The service knows no generation_kwargs, and they are {unknown}; it takes sampling.")
    sampling: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "max_new_tokens": args.max_completion_length,
    }
    own = given.get("sampling") or {}
    sampling |= own.model_dump(exclude_unset=True) if isinstance(own, Sampling) else own
    template = given.get("chat_template_kwargs") or args.chat_template_kwargs or None
    return {**cast(RolloutOptions, given), "sampling": sampling, "chat_template_kwargs": template}


def completion_columns(samples: Sequence[SampleResult], filler_id: int) -> dict[str, list[Any]]:
    """The rows of TRL; `filler_id` stands, masked, for a prompt or a completion of no tokens, which TRL forbids."""
    rows = [token_row(sample).without_tail() for sample in samples]
    rewards = [final_reward(sample) for sample in samples]
    return {
        "prompt_ids": [row.token_ids[: row.prompt_length] or [filler_id] for row in rows],
        "completion_ids": [row.token_ids[row.prompt_length :] or [filler_id] for row in rows],
        "logprobs": [row.generation_logprobs[row.prompt_length :] or [MASKED_LOGPROB] for row in rows],
        "env_mask": [env_mask(row, reward is not None) for row, reward in zip(rows, rewards, strict=True)],
        "total_reward": rewards,
        "rewards": [sample.rewards for sample in samples],
        "status": [sample.status for sample in samples],
        "answer": [sample.answer for sample in samples],
    }


def env_mask(row: TokenRow, is_final: bool) -> list[int]:
    mask = row.loss_mask[row.prompt_length :] or [0]
    return mask if is_final else [0] * len(mask)
