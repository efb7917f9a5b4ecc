"""What of a message may be trained, said by one predicate for messages and for their JSON."""

from typing import Any

import pytest

from rollout_client.contract.messages import GivenMessage, Message, may_be_compared, may_be_trained

SAMPLED = {"role": "assistant", "content": "5", "token_ids": [53], "generation_logprobs": [-0.5]}
COLDER = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.0}


@pytest.mark.parametrize(
    ("fields", "is_trained", "is_compared"),
    [
        ({}, True, True),
        ({"generation_logprobs": None}, False, False),
        ({"constrained": True}, False, False),
        ({"constrained": None}, True, True),
        ({"sampled_with": COLDER}, True, False),
        ({"sampled_with": {"temperature": 0}}, False, False),
        ({"sampled_with": COLDER, "constrained": True}, False, False),
        ({"sampled_with": None}, True, True),
    ],
)
def test_samples_of_the_policy_are_trained_those_of_the_request_compared(
    fields: dict[str, Any], is_trained: bool, is_compared: bool
) -> None:
    given_fields = SAMPLED | fields
    for message in (given_fields, Message.model_validate(given_fields)):
        assert (may_be_trained(message), may_be_compared(message)) == (is_trained, is_compared)


def test_how_a_message_was_sampled_can_be_posted_as_it_came() -> None:
    message = Message.model_validate(SAMPLED | {"sampled_with": COLDER})
    posted = GivenMessage.model_validate(message.model_dump(mode="json", exclude_unset=True))
    assert posted.sampled_with == message.sampled_with
