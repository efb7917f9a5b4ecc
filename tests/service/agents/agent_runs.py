"""Runs of agents that no agent has made, to test what becomes of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from deployments.protocols.generation import WeightSpan, packed_ids, packed_logprobs
from deployments.sessions.records import ChatContext, EngineCall, GeneratedMessage, RenderedMessage
from deployments.sessions.samples import _metrics_of
from deployments.sessions.store import SessionStore
from rollout_client.contract.messages import Message, Role, WeightVersionSpan
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionRequest, SessionSample
from service.rollouts.agent_episode import AgentEpisode, AgentRunOutcome, AgentRunRequest, Agents, AgentTask
from tests.service.scripted import EpisodeRecipe, ids_of


def said(role: Role, text: str) -> Message:
    return Message(role=role, content=text, token_ids=ids_of(text))


def generated(text: str, version: str = "3", finish_reason: str | None = "stop") -> Message:
    return Message.model_construct(
        role="assistant",
        content=text,
        token_ids=packed_ids(ids_of(text)),
        generation_logprobs=packed_logprobs([-0.5] * len(text)),
        finish_reason=finish_reason,
        weight_versions=[WeightVersionSpan(version=version, start=0, end=len(text))],
    )


async def record_call(
    store: SessionStore, session_id: str, messages: Sequence[dict[str, Any]], text: str = "A", call_id: str = ""
) -> str:
    """A call of the engine that generates `text`; returns its id."""
    call_id, context = call_id or uuid4().hex, ChatContext()
    plan = await store.plan(session_id, call_id, messages, context)
    rendered = [RenderedMessage(one, packed_ids(ids_of(one["content"]))) for one in messages[plan.covered :]]
    said: dict[str, Any] = {"role": "assistant", "content": text}
    numbers = packed_ids(ids_of(text)), packed_logprobs([-0.5] * len(text))
    made = GeneratedMessage(call_id, said, text, *numbers, "stop", (WeightSpan("3", 0, len(text)),))
    await store.add(session_id, EngineCall(call_id, context, plan, rendered, packed_ids([1]), [made]))
    return call_id


def branch(*messages: Message, rewards: dict[str, float] | None = None) -> SessionSample:
    """The ids of its generated messages are their texts."""
    log = list(messages)
    names = [message.content for message in log if message.generation_logprobs is not None]
    return SessionSample(
        idx=0,
        generation_index=0,
        task_name="task",
        message_log=[],
        total_reward=0.0,
        rewards=rewards or {},
        status="completed",
        terminated=False,
        truncated=False,
        max_turns_reached=False,
        extra_env_info={},
        metrics=_metrics_of(log, 0.0),
        session_id="session",
        branch=names[-1],
        generation_ids=names,
    ).model_copy(update={"message_log": log})


TWO_CALLS = branch(said("user", "Q"), generated("AB"), said("tool", "T"), generated("C"))


@dataclass
class AgentRecipe(EpisodeRecipe):
    """An episode that an agent plays."""

    task: AgentTask = field(default_factory=lambda: AgentTask(SessionRequest(sample=SampleInput(task_name="task"))))

    def make(self) -> AgentEpisode:
        recipe = EpisodeRecipe(
            position=self.position, group=self.group, retries=self.retries, bounds=self.bounds, message_log=lambda _: []
        )
        return AgentEpisode(recipe.identity(), recipe.start(), recipe.limits(), recipe.tokenizer, self.task)


@dataclass
class ScriptedAgents(Agents):
    """Answers each run with the next one of its script, after `delay_s`; one that is interrupted answers at once."""

    script: Sequence[AgentRunOutcome]
    delay_s: float = 0.0
    requests: list[AgentRunRequest] = field(default_factory=list)
    cancelled: int = 0
    running: dict[str, asyncio.Event] = field(default_factory=dict)

    async def run(self, request: AgentRunRequest) -> AgentRunOutcome:
        answer = self.script[len(self.requests) % len(self.script)]
        self.requests.append(request)
        interrupted = self.running[request.rollout_id] = asyncio.Event()
        try:
            await asyncio.wait_for(interrupted.wait(), self.delay_s)
        except TimeoutError:
            return answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            del self.running[request.rollout_id]
        return AgentRunOutcome(answer.branches, answer.calls)

    def interrupt(self, rollout_id: str) -> bool:
        if rollout_id in self.running:
            self.running[rollout_id].set()
        return rollout_id in self.running
