"""The branches of a session as the contract's rollouts. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.protocols.generation import packed_ids
from deployments.protocols.token_columns import EXPERTS
from deployments.sessions.message_comparison import reasoning_of, text_of
from deployments.sessions.records import GeneratedMessage
from deployments.sessions.session_record import Node, SessionRecord, experts_up_to
from rollout_client.contract.base import read_label
from rollout_client.contract.messages import MediaRange, Message, WeightVersionSpan
from rollout_client.contract.rollouts import PolicyVersions, SampleInput, SampleMetrics, SampleStatus
from rollout_client.contract.sessions import SessionSample

NO_TASK = ""
"""The `task_name` of a session without a task."""


def samples_of(
    session_id: str, record: SessionRecord, sample: SampleInput | None = None, generation_index: int = 0
) -> list[SessionSample]:
    """One sample per branch, in the order in which their last messages were generated."""
    known: set[int] = set()
    samples = []
    for leaf in record.branches():
        path = leaf.path()
        samples.append(_sample_of(session_id, path, record.rewards, sample, generation_index, known))
        known.update(node.number for node in path)
    return samples


def _sample_of(
    session_id: str,
    path: Sequence[Node],
    shared_rewards: Mapping[str, float],
    sample: SampleInput | None,
    generation_index: int,
    known: set[int],
) -> SessionSample:
    """The sample of one branch.

    Args:
        path: the nodes of the branch from its root on.
        known: the numbers of the nodes that earlier samples have.
    """
    log = experts_up_to(path[-1]).of_messages(_message_log_of(path))
    spoken = [node for node in path if node.message is not None]
    generated = [node.generated for node in spoken if node.generated is not None]
    rewards = _summed_rewards([shared_rewards, *(node.rewards for node in spoken)])
    shared = [place for place, node in enumerate(spoken) if node.generated is not None and node.number in known]
    given = sample or SampleInput(task_name=NO_TASK)
    # An agent's rollout has these columns too, and gives them back itself; `POST /sessions` refuses them.
    further = {
        name: value for name, value in (given.model_extra or {}).items() if name not in SessionSample.model_fields
    }
    return SessionSample(
        **further,
        id=given.id,
        idx=given.idx or 0,
        generation_index=generation_index,
        task_name=given.task_name,
        message_log=log,
        total_reward=sum(rewards.values()),
        rewards=rewards,
        status=_status_of(generated[-1]),
        terminated=False,
        truncated=generated[-1].finish_reason == "length",
        max_turns_reached=False,
        extra_env_info=given.extra_env_info,
        observation_format="chat",
        metrics=_metrics_of(log, sum(rewards.values())),
        session_id=session_id,
        branch=generated[-1].id,
        generation_ids=[one.id for one in generated],
        shared_messages=shared,
    )


def _message_log_of(path: Iterable[Node]) -> list[Message]:
    """The messages of a branch. The ids of a generation prompt belong to the message before the response."""
    log: list[Message] = []
    for node in path:
        if node.generated is not None:
            log.append(_generated_message(node.generated, node.rewards))
        elif node.message is not None:
            log.append(_rendered_message(node.message, node.token_ids, node.mm_ranges))
        elif log:
            log[-1].token_ids = packed_ids([*log[-1].token_ids, *node.token_ids])  # type: ignore[assignment]
    return log


def _generated_message(generated: GeneratedMessage, rewards: Mapping[str, float]) -> Message:
    shown = generated.message
    calls, reasoning = shown.get("tool_calls") or None, reasoning_of(shown) or None
    optional: dict[str, Any] = {"constrained": True} if generated.is_constrained else {}
    if generated.sampled_with is not None:
        optional["sampled_with"] = generated.sampled_with
    optional |= {name: column for name, column in generated.columns.items() if name != EXPERTS}
    return Message.model_construct(
        role="assistant",
        content=generated.text,
        token_ids=generated.token_ids,
        generation_logprobs=generated.logprobs,
        finish_reason=generated.finish_reason,
        weight_versions=[
            WeightVersionSpan.model_construct(version=span.version, start=span.start, end=span.end)
            for span in generated.weight_versions
        ],
        reward=sum(rewards.values()) if rewards else None,
        tool_calls=calls,
        reasoning_content=reasoning,
        parsed_content=text_of(shown.get("content")) if calls or reasoning else None,
        **optional,
    )


def _rendered_message(
    message: Mapping[str, Any], token_ids: Sequence[int], mm_ranges: Sequence[MediaRange] = ()
) -> Message:
    optional = {name: message.get(name) for name in ("name", "tool_call_id", "tool_calls")}
    optional["mm_ranges"] = [*mm_ranges]
    return Message.model_construct(
        role=message.get("role"),
        content=text_of(message.get("content")),
        token_ids=token_ids,
        reasoning_content=reasoning_of(message) or None,
        **{name: value for name, value in optional.items() if value},
    )


def _summed_rewards(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for parts in rewards:
        for name, value in parts.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed


def _status_of(last: GeneratedMessage) -> SampleStatus:
    if last.finish_reason is None:
        return "cancelled"
    return "truncated" if last.finish_reason == "length" else "completed"


def _metrics_of(log: Sequence[Message], total_reward: float) -> SampleMetrics:
    """Turns and lengths. The prompt, which is what comes before the first response, is not counted."""
    generated, inputs, observed, length, clipped = [], [], 0, 0, 0
    for message in log:
        if message.generation_logprobs is not None:
            generated.append(len(message.token_ids))
            inputs.append(length)
            clipped += message.finish_reason == "length"
        elif generated:
            observed += len(message.token_ids)
        length += len(message.token_ids)
    metrics = SampleMetrics(
        turn_count=len(generated),
        total_tokens=sum(generated) + observed,
        assistant_tokens=sum(generated),
        env_tokens=observed,
        terminated=False,
        truncated=log[-1].finish_reason == "length",
        max_turns_reached=False,
        total_reward=total_reward,
        turn_gen_tokens=generated,
        turn_input_tokens=inputs,
    )
    if clipped:
        metrics.clipped_turns = clipped
    return metrics


def policy_versions(record: SessionRecord) -> PolicyVersions:
    """The oldest and the newest version that generated tokens of the record."""
    labels = {span.version for generated in record.generated for span in generated.weight_versions}
    ordered = sorted(labels, key=lambda label: read_label(label).number)
    return PolicyVersions(oldest=ordered[0], newest=ordered[-1]) if ordered else PolicyVersions()
