"""The caller's agent as the `rollout_func` of TRL's `GRPOTrainer` (1.16). Needs the extra `trl`.

    trainer = GRPOTrainer(
        model, args=args, train_dataset=dataset,
        reward_funcs=service_reward, rollout_func=AgentRolloutFunc(client, agent),
    )

`agent` is an `async def agent(base_url, api_key, sample)` as `play_agent` takes it: a program that brings its own loop
and calls the model under `base_url`. The service records the generations, on which the model is trained.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Unpack

from rollout_client.agent_runner import Agent, AgentRollout, play_agent
from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.async_twin import async_twin
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.contract.messages import JsonObject
from rollout_client.contract.rollouts import SampleMetrics, SampleResult
from rollout_client.contract.sessions import SessionLimits
from rollout_client.errors import RolloutError
from rollout_client.trainers.dataset_rows import Prompt, messages_of
from rollout_client.trainers.trl import RolloutFuncOptions, ServiceRolloutFunc

NOTHING = SampleResult.model_construct(
    message_log=[], rewards={}, status="error", metrics=SampleMetrics.model_construct(turn_count=0)
)
"""A run without a generation."""
OF_A_SESSION = frozenset({"sampling", "policy", "deadline_s"})


class AgentsFailed(RolloutError):
    """All runs of the agent in a batch have failed; the cause is the error of the first."""


class AgentRolloutFunc(ServiceRolloutFunc):
    """Runs the agent once per prompt of the trainer, in this process, with the trainer's current weights.

    Each run has a session of the service with the trainer's sampling, wherever the agent's own calls do not say
    otherwise: `max_completion_length` limits each call. Weights are pushed as by `ServiceRolloutFunc`.

    TRL takes one completion of each prompt: the branch whose last response was generated last. Other branches, of
    subagents or of a conversation before it was compacted, are not trained.

    Args:
        client: the caller owns it and closes it.
        agent: returns its reward, or None.
        judge: where the agent returns None, the environment of the sample's task judges. Without it there is no reward.
        concurrency: runs at the same time.
        timeout_s: limit of one run, in seconds.
        limits: bounds of each session.
        connect: makes the client of the sessions; by default one that sends through `client`, with its settings.
        options: those of `ServiceRolloutFunc`. Of the request's fields, sessions have only `sampling` and `deadline_s`.
    """

    def __init__(
        self,
        client: RolloutClient,
        agent: Agent,
        *,
        judge: bool = True,
        concurrency: int = 64,
        timeout_s: float | None = None,
        limits: SessionLimits | None = None,
        connect: Callable[[], AsyncRolloutClient] | None = None,
        **options: Unpack[RolloutFuncOptions],
    ) -> None:
        super().__init__(client, **options)
        self._agent = agent
        self._runs: dict[str, Any] = {"judge": judge, "concurrency": concurrency, "timeout_s": timeout_s}
        self._runs |= {} if limits is None else {"limits": limits}
        self._connect = connect or partial(async_twin, client)

    def _prompt_fields(self, prompt: Prompt, tokenizer: Any) -> JsonObject:  # noqa: ARG002 - an agent gets messages
        return {"messages": [*messages_of(prompt)]}

    def _played(
        self, samples: list[JsonObject], options: RolloutOptions
    ) -> tuple[list[SampleResult], list[float | None]]:
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if others := given.keys() - OF_A_SESSION:
            raise ValueError(f"Sessions of agents have no {', '.join(sorted(others))}: the agent's own calls say it.")
        if given["sampling"].get("seed") is not None:
            raise ValueError("With a seed, the rollouts of a group would be equal: leave it out of sampling.")

        async def played() -> list[list[AgentRollout]]:
            async with self._connect() as client:
                return await play_agent(client, self._agent, samples, **self._runs, **given)

        # In a notebook this thread has an event loop already.
        with ThreadPoolExecutor(1) as thread:
            rollouts = [rollout for [rollout] in thread.submit(asyncio.run, played()).result()]
        if rollouts and all(rollout.error is not None for rollout in rollouts):
            raise AgentsFailed(
                f"All {len(rollouts)} runs of the agent failed; the first: {rollouts[0].error!r}"
            ) from rollouts[0].error
        # A run without a generation has nothing that a reward could train.
        rewards = [rollout.total_reward if rollout.samples else None for rollout in rollouts]
        return [_sample_of(rollout) for rollout in rollouts], rewards


def _sample_of(rollout: AgentRollout) -> SampleResult:
    """The branch that was generated last, with the status of the run."""
    if not rollout.samples:
        return NOTHING
    latest = rollout.samples[-1]
    return latest if rollout.error is None else latest.model_copy(update={"status": "error"})
