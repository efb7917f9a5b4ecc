"""The service as the agent loop manager of verl's `RayPPOTrainer`. Needs the extra `torch`; verl is not imported.

    trainer.use_v1=false
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout_client.trainers.verl.ServiceAgentLoopManager
    +actor_rollout_ref.rollout.custom.rollout_service.url=http://127.0.0.1:8000
    +actor_rollout_ref.rollout.custom.rollout_service.task_name=math

Checked against verl's source at commit 1dda039 (0.10.0.dev) by a stand-in that calls it as `RayPPOTrainer` does; not
run in verl. verl's V1 trainer, its default, takes rollouts from a TransferQueue and cannot use it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, cast

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rollout_client.calls.records import ReportColumns
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.contract.messages import JsonObject
from rollout_client.contract.mismatch import ReportAnswer
from rollout_client.contract.rollouts import ObservationFormat, SampleResult
from rollout_client.results import (
    RolloutsNotFinal,
    final_reward,
    token_row,
)
from rollout_client.tensors.rollout_tensors import unpadded
from rollout_client.trainers.dataset_rows import RowReader, messages_of
from rollout_client.trainers.verl_batch import (
    Row,
    columns_of,
    reward_columns,
    score_tensor,
    tensors_of,
    with_group_means,
)

GREEDY: JsonObject = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


class DataProto(Protocol):
    """The part of verl's class that is used."""

    batch: Any
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any]

    def __len__(self) -> int: ...

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, NDArray[Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> Self: ...


class VerlSettings(BaseModel):
    """The config below `actor_rollout_ref.rollout.custom.rollout_service`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """Address of the service; by default the environment variable `ROLLOUT_URL`. The key is `ROLLOUT_API_KEY`."""
    task_name: str | None = None
    """The task of rows without a column `task_name`."""
    env_columns: list[str] = []
    """The columns that become `extra_env_info` in rows without a column of that name. Without either it is the
    `ground_truth` of `reward_model`."""
    reward_names: list[str] = []
    """Named rewards of the environment that verl logs. Every rollout should have them."""
    turn_rewards: bool = False
    """Score each turn at the last token of its response, in place of the whole rollout at its last token."""
    not_final: Literal["mask", "raise"] = "mask"
    """Treatment of rollouts that failed or were cut off; see `ServiceAgentLoopManager`."""
    check_tokenizer: bool = True
    """Check at the start that the tokenizer of `actor_rollout_ref.model` makes the service's tokens."""
    sampling: JsonObject = {}
    """Further fields, such as `stop_strings`. Temperature, top-p, top-k and lengths are verl's."""
    max_seq_len: int | None = None
    """Limit in tokens: prompt, generations and observations together; by default `prompt_length + response_length`."""
    max_rollout_turns: int | None = None
    observation_format: ObservationFormat | None = None
    chat_template_kwargs: JsonObject | None = None
    deadline_s: float | None = None
    sample_retries: int | None = None


class ServiceAgentLoopManager:
    """Plays each row of a batch as one rollout of the service.

    The environment's `total_reward` is the score of the row, at its last token or, with `turn_rewards`, spread over the
    last tokens of its turns; verl's reward functions and reward models are not called.
    A response is cut at `response_length`, as in verl's own agent loops.

    A row has no final reward if its rollout failed or was cut off, or if its prompt is longer than `prompt_length`.
    verl has no such rows. With `not_final: mask` the response of the row is empty, and its score is the mean of the
    rows with the same `uid`, or of the batch where those have none, so that no baseline changes. With `raise`, and
    where no row of the batch has one, `generate_sequences` raises `RolloutsNotFinal`.

    Raises:
        ValueError: the settings are not valid, or verl wants log-probabilities of a teacher.
        TokenizerDiffers: the tokenizer of the trainer's model makes other tokens than the service's.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any = None,  # noqa: ARG002 - of verl's own engines
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        if teacher_client:
            raise ValueError("The service has no log-probabilities of teachers: turn verl's distillation off.")
        self._rollout_config = config.actor_rollout_ref.rollout
        self._settings = settings_of(self._rollout_config)
        self._returns_inputs = reward_loop_worker_handles is None
        self._reader = RowReader(self._settings.task_name, self._settings.env_columns)
        self.client = RolloutClient(self._settings.url)
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        if self._settings.check_tokenizer:
            self.client.check_tokenizer(tokenizer)
        pad_id = tokenizer.pad_token_id
        self._pad_id: int = tokenizer.eos_token_id if pad_id is None else pad_id

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes a manager as verl's trainer does."""
        return cls(*args, **kwargs)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A batch of the class of `prompts`, one row for each of its rows, in order.

        Tensors, with B rows, P = `prompt_length` and R = `response_length`: `prompts` [B, P], padded on the left;
        `responses`, `response_mask` (1 for a generated token), `rollout_log_probs` and `rm_scores` [B, R], padded on
        the right; `input_ids`, `attention_mask` and `position_ids` [B, P + R].

        Besides verl's columns there are `weight_versions` (per row a list of `version`, `start` and `end` of generated
        tokens of the response), `min_weight_version` and `max_weight_version` (-1 if not known), `status`, `rewards`,
        `answer` and `rollout_id`.

        Raises:
            RolloutError: the service cannot be reached or refuses the request.
            RolloutsNotFinal: see the class.
        """
        samples, metrics = self._play(prompts)
        rows = [self._row(sample) for sample in samples]
        lost = [row.sample for row in rows if row.reward is None]
        if lost and (self._settings.not_final == "raise" or len(lost) == len(rows)):
            raise RolloutsNotFinal(lost, len(rows))
        groups = list(prompts.non_tensor_batch.get("uid", range(len(rows))))
        scores = with_group_means([row.reward for row in rows], groups)
        kept = prompts.non_tensor_batch if self._returns_inputs else {}
        timing = {f"rollout_service/{name}": value for name, value in metrics.items() if isinstance(value, int | float)}
        timing["rollout_service/not_final_rate"] = len(lost) / len(rows)
        return type(prompts).from_dict(
            tensors={
                **tensors_of(rows, self._rollout_config, self._pad_id),
                "rm_scores": score_tensor(rows, scores, self._rollout_config, self._settings.turn_rewards),
            },
            non_tensors={
                **kept,
                "raw_prompt": prompts.non_tensor_batch["raw_prompt"],
                **columns_of(rows),
                **reward_columns(rows, groups, self._settings.reward_names),
            },
            meta_info={"timing": timing, "reward_extra_keys": list(self._settings.reward_names)},
        )

    def _play(self, prompts: DataProto) -> tuple[list[SampleResult], Mapping[str, Any]]:
        """The rollouts in the order of the rows, and the metrics of those that are sampled as the config says."""
        columns = prompts.non_tensor_batch
        samples = [
            sample_of({name: column[place] for name, column in columns.items()}, place, self._reader)
            for place in range(len(prompts))
        ]
        is_validation = bool(prompts.meta_info.get("validate", False))
        is_sampled = [is_validation or bool(each) for each in columns.get("__do_sample__", [True] * len(samples))]
        played: dict[int, SampleResult] = {}
        metrics: Mapping[str, Any] = {}
        for sampled in (False, True):
            chosen = [sample for sample, each in zip(samples, is_sampled, strict=True) if each == sampled]
            if chosen:
                options = request_options(self._rollout_config, self._settings, is_validation, greedy=not sampled)
                response = self.client.rollout(chosen, **options)
                played |= {sample.idx: sample for sample in response.samples}
                metrics = response.metrics
        return [played[place] for place in range(len(samples))], metrics

    def _row(self, sample: SampleResult) -> Row:
        longest_prompt, longest_response = self._rollout_config.prompt_length, self._rollout_config.response_length
        tokens = token_row(sample).without_tail()
        start = tokens.prompt_length
        reward = final_reward(sample) if start <= longest_prompt else None
        end = start if reward is None else start + longest_response
        return Row(tokens.token_ids[:start][-longest_prompt:], tokens.part(start, end), reward, sample)


# From verl's config and batch to the request


def settings_of(rollout_config: Any) -> VerlSettings:
    custom = plain(rollout_config.get("custom")) or {}
    return VerlSettings.model_validate(custom.get("rollout_service") or {})


def plain(value: Any) -> Any:
    """Converts OmegaConf's containers to Python's."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value


def load_tokenizer(model_config: Any) -> Any:
    """The tokenizer of the trainer's model, with the chat template that the config gives it."""
    from transformers import AutoTokenizer  # takes seconds, and nothing else needs it

    tokenizer = cast(Any, AutoTokenizer).from_pretrained(
        model_config.get("tokenizer_path") or model_config.path,
        trust_remote_code=bool(model_config.get("trust_remote_code", False)),
    )
    if (template := model_config.get("custom_chat_template")) is not None:
        tokenizer.chat_template = template
    return tokenizer


def request_options(
    rollout_config: Any, settings: VerlSettings, is_validation: bool, *, greedy: bool
) -> RolloutOptions:
    """verl's sampling for training or validation; `greedy` is for the baselines of REMAX."""
    source = rollout_config.val_kwargs if is_validation else rollout_config
    sampling = {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}
    longest = rollout_config.prompt_length + rollout_config.response_length
    return {
        "sampling": {
            **settings.sampling,
            **(GREEDY if greedy else sampling),
            "max_new_tokens": rollout_config.response_length,
        },
        "max_seq_len": settings.max_seq_len or longest,
        "max_rollout_turns": settings.max_rollout_turns,
        "observation_format": settings.observation_format,
        "chat_template_kwargs": settings.chat_template_kwargs,
        "deadline_s": settings.deadline_s,
        "sample_retries": settings.sample_retries,
    }


def sample_of(row: Mapping[str, Any], place: int, reader: RowReader) -> JsonObject:
    """Raises `ValueError` if the row has no task, or lacks one of the columns that the environment needs."""
    if row.get("extra_env_info") is None and not reader.env_columns:
        row = {**row, "extra_env_info": ground_truth(row)}
    messages: list[Any] = messages_of(list(row["raw_prompt"]))
    return {**reader.fields(row), "messages": messages, "idx": place}


def ground_truth(row: Mapping[str, Any]) -> JsonObject:
    of_reward_model = row.get("reward_model") or {}
    return {"ground_truth": of_reward_model["ground_truth"]} if "ground_truth" in of_reward_model else {}


# From the rollouts to verl's batch


def report_old_log_probs(client: RolloutClient, data: DataProto) -> ReportAnswer:
    """Tells the service which log-probabilities verl has computed for a batch of `ServiceAgentLoopManager`.

    To be called once `old_log_probs` are in the batch: verl computes them at the rollout's temperature, before the
    first update of the step. Rows with an empty response are left out.

    Returns:
        The mean and largest ratio of the probabilities, and what makes them part.

    Raises:
        RolloutError: the service cannot be reached, or keeps no records of rollouts.
        ValueError: no row has a response, or a row has no `rollout_id`.
    """
    return client.report_logprobs(**old_log_probs_report(data))


def old_log_probs_report(data: DataProto) -> ReportColumns:
    batch = data.batch
    is_token = batch["attention_mask"].bool()
    is_response = is_token[:, -batch["responses"].shape[1] :]
    has_response = is_response.any(1)
    if not has_response.any():
        raise ValueError("no row of the batch has a response: there is nothing to report")
    rows = has_response.nonzero()[:, 0].cpu()
    is_response = is_response[rows]
    input_ids = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    return {
        "rollouts": data.non_tensor_batch["rollout_id"][rows.numpy()].tolist(),
        "logprobs": unpadded(batch["old_log_probs"][rows], is_response),
        "masks": unpadded(batch["response_mask"][rows], is_response),
        "token_ids": unpadded(input_ids[rows], is_token[rows]),
        "starts": (is_token[rows].sum(1) - is_response.sum(1)).tolist(),
    }
