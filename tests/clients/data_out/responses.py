"""Responses for the tests of what is made of them."""

from typing import Any

from hypothesis import strategies as st

from rollout_client import RolloutResponse
from tests.clients.scripted_service import SUMMARY, Json, result

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda children: st.lists(children, max_size=2) | st.dictionaries(texts, children, max_size=2),
    max_leaves=3,
)


def response_of(*samples: Json, **summary: Any) -> RolloutResponse:
    return RolloutResponse.model_validate({**SUMMARY, **summary, "samples": list(samples)})


@st.composite
def messages(draw: st.DrawFn) -> Json:
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    message: Json = {"role": "user", "content": draw(texts), "token_ids": token_ids}
    if draw(st.booleans()):
        message |= {
            "role": "assistant",
            "generation_logprobs": draw(st.lists(numbers, min_size=len(token_ids), max_size=len(token_ids))),
            "weight_versions": [{"version": "run-b/7", "start": 0, "end": len(token_ids)}],
            "finish_reason": draw(st.sampled_from(["stop", "length", None])),
        }
    return message | draw(st.dictionaries(st.sampled_from(["reward", "parse_error"]), st.none(), max_size=2))


@st.composite
def samples(draw: st.DrawFn) -> Json:
    further = draw(st.dictionaries(texts.filter(lambda name: name.startswith("x")), json_values, max_size=2))
    rewards = draw(st.dictionaries(texts, numbers, max_size=2))
    error = draw(st.none() | st.just({"kind": "timeout", "message": "Late.", "retryable": True, "replica": "a"}))
    return further | result(
        draw(st.integers(-(2**63), 2**63 - 1)),
        message_log=draw(st.lists(messages(), max_size=3)),
        total_reward=draw(st.none() | numbers),
        rewards=rewards,
        error=error,
        extra_env_info=draw(st.dictionaries(texts, json_values, max_size=2)),
    )


responses = st.builds(response_of, *[samples()] * 2, further=json_values) | st.builds(response_of)
