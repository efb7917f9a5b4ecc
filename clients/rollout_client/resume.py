"""Continues a sample that was cut off."""

from rollout_client.contract.rollouts import GivenMessage, SampleInput, SampleResult


def resumed(sample: SampleResult) -> SampleInput:
    """A sample that continues `sample` from its last token, with all its fields; it can be posted as it is.

    A response in whose middle it was cut off goes on as the same message. Its turns so far count towards
    `max_rollout_turns`; its rewards so far stand on its messages, and the new result counts only what comes after.
    Under greedy decoding it ends as if it had never been cut; sampled, also with a seed, it draws the rest anew.
    """
    return SampleInput.model_validate(
        {
            **(sample.model_extra or {}),
            "id": sample.id,
            "idx": sample.idx,
            "task_name": sample.task_name,
            "message_log": [
                message.model_dump(exclude_unset=True, include=set(GivenMessage.model_fields))
                for message in sample.message_log
            ],
            "extra_env_info": sample.extra_env_info,
            "stop_strings": sample.stop_strings,
            "observation_format": sample.observation_format,
            "tools": sample.tools,
            "chat_template_kwargs": sample.chat_template_kwargs,
        }
    )
