"""Synthetic rollouts and trainers: tokens are drawn from random logits, and a trainer computes from changed ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.rollout_records.comparison import ComparedRollout, TrainerReport, compared

VOCABULARY = 40
PROMPT = 3
LATEST = {"": 99}
"""Versions up to 99 were served."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    normalized: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalized


@dataclass
class Sampler:
    """Makes records of rollouts of one response."""

    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    temperature: float = 1.0

    def rollout(
        self, name: str, tokens: int = 24, replica: str = "a", version: str = "3", noise: float = 0.0, group: str = ""
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """The record, the logits of each place, and the tokens. `noise` is that of the replica's own logits."""
        logits = self.random.normal(0, 2, (tokens, VOCABULARY))
        logprobs = log_softmax((logits + noise * self.random.normal(0, 1, logits.shape)) / self.temperature)
        chosen = np.array([self.random.choice(VOCABULARY, p=np.exp(row)) for row in logprobs])
        sampled = logprobs[np.arange(tokens), chosen]
        return record_of(name, chosen, sampled, replica, version, group, self.temperature), logits, chosen


def record_of(
    name: str,
    chosen: np.ndarray,
    sampled: Sequence[float] | np.ndarray,
    replica: str = "a",
    version: str = "3",
    group: str = "",
    temperature: float = 1.0,
) -> dict[str, Any]:
    count = len(chosen)
    response = {
        "role": "assistant",
        "token_ids": chosen.tolist(),
        "generation_logprobs": list(map(float, sampled)),
        "weight_versions": [{"version": version, "start": 0, "end": count}],
    }
    return {
        "rollout": {
            "rollout_id": name,
            "message_log": [
                {"role": "user", "token_ids": [1] * PROMPT},
                response,
                {"role": "environment", "token_ids": [2, 2]},
            ],
            "replay": {"temperature": temperature},
        },
        "group_id": group or name,
        "policy": None,
        "generations": [{"message": 1, "start": 0, "end": count, "replica": replica}],
    }


def reported(
    record: dict[str, Any], trained: np.ndarray, chosen: np.ndarray, version: str | None = None
) -> ComparedRollout:
    """The comparison with a trainer that has these log-probabilities at each place."""
    own = trained[np.arange(len(chosen)), chosen]
    return compared(record, TrainerReport(record["rollout"]["rollout_id"], own, weight_version=version), LATEST)[0]


Trainer = Callable[[np.ndarray, int], np.ndarray]
"""From the logits of each place, and the number of the rollout, to the trainer's log-probabilities."""
