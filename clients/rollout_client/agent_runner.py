"""Plays a program with a loop of its own, an agent, over many samples: one session of the service for each rollout."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.json_values import as_given, json_value
from rollout_client.calls.progress import counting_bar
from rollout_client.contract.rollouts import SampleInput, SampleResult
from rollout_client.contract.sessions import SessionSample
from rollout_client.errors import RolloutError
from rollout_client.results import branches_beside, main_branch

AgentReward = float | dict[str, float] | None
"""One number, or named parts whose sum is the reward; `None` if the agent does not judge itself."""
Agent = Callable[[str, str, SampleInput], Awaitable[AgentReward]]
"""Called with `base_url` (for OpenAI's clients; Anthropic's take it without `/v1`), `api_key` and the sample."""


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """One run of an agent on one sample."""

    idx: int
    """The sample's index in the input."""
    generation_index: int
    """Index of the rollout in its group, from 0."""
    samples: list[SessionSample]
    """Its generations as rollouts: one for each branch of its conversations."""
    total_reward: float | None
    """The reward that the agent returned or the environment judged; `None`, not zero, if neither is known or it
    failed."""
    error: Exception | None = None
    """The exception of the agent, `TimeoutError` after `timeout_s`, or the reason why its record could not be read."""

    def as_result(self) -> SampleResult:
        """The run as one rollout, in the form of a task that an agent plays.

        It has the log and the rewards of the branch that was generated last, of the seats of a game of the first one,
        and the others as its `branches`. Its total reward is `None` if that of the run is.

        Raises:
            ValueError: nothing was generated.
        """
        if not self.samples:
            raise ValueError(f"Nothing was generated in the run of sample {self.idx}.")
        main = main_branch(self.samples)
        others = [sample for sample in self.samples if sample is not main]
        unknown = {"total_reward": None} if self.total_reward is None else {}
        return main.model_copy(update={"branches": branches_beside(main, others), **unknown})

    @property
    def generated_tokens(self) -> int:
        """Each counted once, however many branches share it."""
        return sum(
            len(message.token_ids)
            for sample in self.samples
            for index, message in enumerate(sample.message_log)
            if message.generation_logprobs is not None and index not in sample.shared_messages
        )


async def play_agent(
    client: AsyncRolloutClient,
    agent: Agent,
    samples: Iterable[SampleInput | Mapping[str, Any]],
    *,
    num_generations: int = 1,
    progress: bool = False,
    **options: Any,
) -> list[list[AgentRollout]]:
    """Plays `agent` `num_generations` times on each sample. Returns a group for each sample, in input order.

    Each run gets a sample of its own, which it may change: neither its siblings nor the caller see that. A run that
    fails is data beside its siblings': an `AgentRollout` with an `error`.

    Args:
        progress: shows a bar on stderr (needs the `cli` extra).
        options: `concurrency`, `timeout_s`, `judge` and fields of the sessions, as `agent_rollouts` takes them.

    Raises:
        RolloutError: a session cannot be opened. Runs that have begun are cancelled.
        NotJson: a sample holds a value that JSON does not have; no run has begun.
        ValueError: the arguments are at fault.
    """
    inputs = [*samples]
    ended: list[AgentRollout] = []
    with counting_bar(len(inputs) * num_generations) if progress else nullcontext() as count:
        running = agent_rollouts(client, agent, inputs, num_generations=num_generations, **options)
        async with aclosing(running) as rollouts:
            async for rollout in rollouts:
                ended.append(rollout)
                if count is not None:
                    count(rollout.generated_tokens, rollout.error is not None, rollout.total_reward)
    ended.sort(key=lambda rollout: (rollout.idx, rollout.generation_index))
    return [ended[start : start + num_generations] for start in range(0, len(ended), num_generations)]


async def agent_rollouts(
    client: AsyncRolloutClient,
    agent: Agent,
    samples: Iterable[SampleInput | Mapping[str, Any]],
    *,
    num_generations: int = 1,
    concurrency: int = 64,
    timeout_s: float | None = None,
    judge: bool = False,
    **session: Any,
) -> AsyncGenerator[AgentRollout, None]:
    """As `play_agent`, and yields each rollout when it ends. Closing the generator cancels the runs that have begun.

    Args:
        concurrency: runs at the same time.
        timeout_s: of one run, in seconds; beyond it the run is cancelled and its calls are aborted.
        judge: the environment of the sample's task judges what an agent has generated that returned no reward.
        session: further fields of `SessionRequest` for every run, such as `sampling`, `include`, `policy`, `limits`.
    """
    if num_generations < 1 or concurrency < 1:
        raise ValueError("num_generations and concurrency are at least 1")
    given = json_value({"samples": [as_given(sample) for sample in samples]})["samples"]
    inputs = [SampleInput.model_validate(sample) for sample in given]

    async def run(idx: int, generation_index: int) -> AgentRollout:
        """One rollout. Raises `RolloutError` if its session cannot be opened. A later failure is its error."""
        sample = inputs[idx].model_copy(deep=True)
        sample.idx = idx if sample.idx is None else sample.idx
        branches: list[SessionSample] = []
        reward: AgentReward = None
        error: Exception | None = None
        is_judged = False
        async with client.sessions.open(**session, sample=sample, generation_index=generation_index) as opened:
            try:
                async with asyncio.timeout(timeout_s):
                    reward = await agent(opened.base_url, opened.api_key, sample)
                if reward is not None:
                    await opened.reward(reward)
                elif judge:
                    await opened.judge()
                    is_judged = True
            except Exception as raised:  # noqa: BLE001 - a rollout that fails is data beside the others
                error = raised
        try:
            branches = await opened.samples()
        except RolloutError as raised:
            error = error or raised
        if is_judged and branches:
            reward = branches[-1].rewards
        total: float | None = None
        if error is None and reward is not None:
            total = sum(reward.values()) if isinstance(reward, dict) else float(reward)
        return AgentRollout(idx, generation_index, branches, total, error)

    places = ((idx, generation) for idx in range(len(inputs)) for generation in range(num_generations))
    running: set[asyncio.Task[AgentRollout]] = set()
    ended: list[asyncio.Task[AgentRollout]] = []
    try:
        while True:
            for idx, generation_index in islice(places, concurrency - len(running)):
                running.add(asyncio.create_task(run(idx, generation_index)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended += done
            while ended:
                yield ended.pop().result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *ended, return_exceptions=True)
