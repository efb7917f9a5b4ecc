"""A file of rollouts as a log of inspect-ai, by inspect's own types: for `inspect view`.

rollout eval math --num-generations 4 --output rollouts.jsonl
python examples/evaluations/inspect_log.py rollouts.jsonl logs/math.eval
"""

import sys
from datetime import UTC, datetime

from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser
from inspect_ai.scorer import Score

from rollout_client import Message, SampleResult, read_rollouts

KINDS = {"system": ChatMessageSystem, "assistant": ChatMessageAssistant, "tool": ChatMessageTool}


def inspect_log(rollouts: list[SampleResult]) -> EvalLog:
    """One log of the rollouts of one task. An epoch is a rollout of a sample."""
    task = rollouts[0].task_name
    spec = EvalSpec(
        created=datetime.now(UTC).isoformat(),
        task=task,
        dataset=EvalDataset(name=task),
        model="rollout/policy",
        config=EvalConfig(epochs=1 + max(rollout.generation_index for rollout in rollouts)),
    )
    return EvalLog(status="success", eval=spec, samples=[sample_of(rollout) for rollout in rollouts])


def sample_of(rollout: SampleResult) -> EvalSample:
    messages = [message_of(message) for message in rollout.message_log]
    generated = [message.generation_logprobs is not None for message in rollout.message_log]
    reward = rollout.total_reward
    return EvalSample(
        id=rollout.id or rollout.idx,
        epoch=1 + rollout.generation_index,
        input=messages[: generated.index(True)] if any(generated) else messages,
        target="",
        messages=messages,
        scores={} if reward is None else {"reward": Score(value=reward)},
        metadata={"status": rollout.status, "rewards": rollout.rewards, "error": rollout.error},
    )


def message_of(message: Message) -> ChatMessage:
    return KINDS.get(message.role, ChatMessageUser)(content=message.content)


if __name__ == "__main__":
    write_eval_log(inspect_log(list(read_rollouts(sys.argv[1]))), sys.argv[2])
