"""Rollouts with given message logs, for tests of what a trainer reads from them."""

from typing import Any

from rollout_client import SampleResult
from tests.clients.scripted_service import DIED, Json, result


def given_message(*token_ids: int, role: str = "user") -> Json:
    return {"role": role, "content": "", "token_ids": list(token_ids)}


def generated(*token_ids: int, logprob: float = -0.5, **fields: Any) -> Json:
    message = {"role": "assistant", "content": "", "token_ids": list(token_ids)}
    return message | {"generation_logprobs": [logprob] * len(token_ids)} | fields


def rollout(*message_log: Json, reward: float | None = 1.0, **fields: Any) -> SampleResult:
    named = {} if reward is None else {"reward": reward}
    return SampleResult(
        **result(**({"message_log": list(message_log), "total_reward": reward, "rewards": named} | fields))
    )


def failed(*message_log: Json, **fields: Any) -> SampleResult:
    return rollout(*message_log, **({"reward": None, "status": "error", "error": DIED} | fields))


TWO_TURNS = rollout(
    given_message(1, 2),
    generated(
        3,
        4,
        logprob=-0.25,
        weight_versions=[{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
    ),
    given_message(5),
    generated(6, logprob=-1.5, weight_versions=[{"version": "8", "start": 0, "end": 1}]),
    given_message(7, 8, role="environment"),
)
GREEDY: Json = {"sampled_with": {"temperature": 0.0}}
NOT_FREE = rollout(
    given_message(1),
    generated(2, 3, constrained=True, reward=0.5),
    generated(4, logprob=-1.0),
    generated(5, reward=0.25, **GREEDY),
    generated(6, sampled_with={"temperature": 0.5, "top_p": 0.9}),
    generated(7, constrained=True),
)
"""Of five responses the second and the fourth are samples of the policy."""
ONE_TURN = rollout(given_message(1), generated(9), reward=0.0, generation_index=1)
