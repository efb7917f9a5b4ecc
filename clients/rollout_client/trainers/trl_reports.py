"""Reports of the log-probabilities that TRL's `GRPOTrainer` (1.16) computes in its loss. Needs the extra `trl`.

Of the trainer it reads the arguments of `compute_loss` (the prompts and completions with their masks, and
`sampling_per_token_logps`), the first result of `_get_per_token_logps_and_entropies` in it, and `_metrics`, to which it
adds `mismatch/mean_ratio`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

from rollout_client.calls.records import ReportColumns
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.errors import RolloutError
from rollout_client.results import TokenRow
from rollout_client.tensors.rollout_tensors import unpadded

logger = logging.getLogger("rollout_client")


@dataclass(frozen=True, slots=True)
class Expected:
    """A rollout that the trainer has got."""

    rollout_id: str
    tokens: TokenRow


class LossReports:
    """Reports the losses that are computed with the weights that have sampled: those of the first step after rollouts.

    The rows of a loss are in another order than the rollouts, and are known by their completions. A report that fails
    is logged, and so is each kind of cause once; the training goes on.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._trainer: Any = None
        self._step = -1
        self._version: str | None = None
        self._expected: dict[bytes, list[Expected]] = {}
        self._computed: torch.Tensor | None = None
        self._told: set[str] = set()

    def expect(self, trainer: Any, rollouts: Sequence[Expected], version: str | None) -> None:
        """The trainer has got these rollouts, with weights that are `version` at the service."""
        if trainer is not self._trainer:
            self._trainer = trainer
            self._listen(trainer)
        self._step, self._version = trainer.state.global_step, version
        self._expected.clear()
        for rollout in rollouts:
            begin = rollout.tokens.prompt_length
            key = completion_key(rollout.tokens.token_ids[begin:], rollout.tokens.generation_logprobs[begin:])
            self._expected.setdefault(key, []).append(rollout)

    def _listen(self, trainer: Any) -> None:
        compute_loss, get_logps = trainer.compute_loss, trainer._get_per_token_logps_and_entropies

        @wraps(get_logps)
        def listening_get_logps(*args: Any, **kwargs: Any) -> Any:
            computed = get_logps(*args, **kwargs)
            self._computed = computed[0].detach()
            return computed

        @wraps(compute_loss)
        def listening_compute_loss(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            self._computed = None
            loss = compute_loss(model, inputs, *args, **kwargs)
            if trainer.model.training and trainer.state.global_step == self._step:
                self._report(inputs)
            return loss

        trainer.compute_loss = listening_compute_loss
        trainer._get_per_token_logps_and_entropies = listening_get_logps

    def _report(self, inputs: Mapping[str, Any]) -> None:
        if self._computed is None:
            raise ValueError("report_logprobs: this version of TRL computes its loss in another way; leave it out.")
        columns, unknown = self._columns(inputs, self._computed)
        if unknown:
            logger.warning(
                "%s rows of the trainer have completions that the service has not sampled: they are not reported. Are "
                "the columns of ServiceRolloutFunc changed on their way?",
                unknown,
            )
        if not columns["rollouts"]:
            return
        try:
            answer = self._client.report_logprobs(**columns, weight_version=self._version)
        except RolloutError as error:
            logger.warning("The service has not taken the trainer's log-probabilities: %s", error)
            return
        self._trainer._metrics["train"]["mismatch/mean_ratio"].append(answer.mean_ratio)
        for cause in answer.causes:
            if cause.kind not in self._told:
                self._told.add(cause.kind)
                logger.warning("Trainer and service part: %s", cause.message)

    def _columns(self, inputs: Mapping[str, Any], computed: torch.Tensor) -> tuple[ReportColumns, int]:
        """The arguments of a report, and how many rows are of no rollout."""
        is_completion = inputs["completion_mask"]
        mask = is_completion * inputs.get("tool_mask", 1)
        rows = zip(
            unpadded(inputs["prompt_ids"], inputs["prompt_mask"]),
            unpadded(inputs["completion_ids"], is_completion),
            unpadded(inputs["sampling_per_token_logps"], is_completion),
            unpadded(computed, is_completion),
            unpadded(mask, is_completion),
            strict=True,
        )
        rollouts: list[str] = []
        logprobs, masks, token_ids, starts, unknown = [], [], [], [], 0
        for prompt, completion, sampled, own, in_loss in rows:
            if not len(completion):
                # With mask_truncated_completions TRL takes it away.
                continue
            rollout = self._taken(completion_key(completion.tolist(), sampled.tolist()), prompt.tolist())
            if rollout is None:
                unknown += 1
                continue
            rollouts.append(rollout.rollout_id)
            logprobs.append(own)
            masks.append(in_loss)
            token_ids.append(torch.cat([prompt, completion]))
            starts.append(rollout.tokens.prompt_length)
        columns: ReportColumns = {
            "rollouts": rollouts,
            "logprobs": logprobs,
            "masks": masks,
            "token_ids": token_ids,
            "starts": starts,
        }
        return columns, unknown

    def _taken(self, key: bytes, prompt: list[int]) -> Expected | None:
        """A rollout with this completion that was not reported yet: of the same prompt, or else of another."""
        rollouts = self._expected.get(key)
        if not rollouts:
            return None
        prompts = [rollout.tokens.token_ids[: rollout.tokens.prompt_length] for rollout in rollouts]
        return rollouts.pop(prompts.index(prompt) if prompt in prompts else 0)


def completion_key(token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes() + np.asarray(logprobs, np.float32).tobytes()
