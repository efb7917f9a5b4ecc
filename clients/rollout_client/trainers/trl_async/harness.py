"""Agents of sessions in the OpenEnv harness of TRL's experimental `AsyncGRPOTrainer` (1.16). Needs `trl`, `openenv`.

    factory = partial(AgentSessionFactory, url, my_agents.agent, rows=dataset, task_name="math", max_new_tokens=512)
    worker = HarnessRolloutWorker(harness_session_factory=factory, dataset=dataset, reward_funcs=[], ...)
    trainer = AsyncGRPOTrainer(model, args=args, rollout_worker=worker, weight_transfer=ServiceWeightTransfer(client))

TRL's worker begins the rollouts, groups and scores them; each is a run of the agent in a session of the service. TRL
gets each branch of its conversations with the engine's own tokens, those that branches share once.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from openenv.core.harness import Message as ChatMessage
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
from openenv.core.harness.training import TrainingTrace, TrainingTurn

from rollout_client.agent_runner import Agent, AgentRollout, play_agent
from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.contract.messages import JsonObject, Message
from rollout_client.contract.sessions import SessionSample
from rollout_client.contract.training import may_be_trained
from rollout_client.trainers.dataset_rows import Prompt, RowReader, fields_by_prompt, messages_of, prompt_key

SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p")
"""Fields of the worker's sampling that sessions use; others have no effect."""


class AgentRunSession(ResourceSession):
    """One run of the agent, which owns its loop: there are no tools, and no messages to begin with."""

    def __init__(self, run: Future[AgentRollout]) -> None:
        self._run = run

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Returns 0 when the run has ended; raises what the agent raised, `TimeoutError` after its `timeout_s`."""
        if (error := self._run.result(timeout_s).error) is not None:
            raise error
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        return training_trace(self._run.result().samples)

    def verify(self, transcript: list[ChatMessage], final_state: Any | None = None) -> VerifyResult:  # noqa: ARG002
        """The reward that the agent returned, or the environment judged."""
        return VerifyResult(env_reward=self._run.result().total_reward, done=True)

    def close(self) -> None:
        """Cancels the run, and its calls at the service."""
        self._run.cancel()

    def initial_messages(self) -> list[ChatMessage]:
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:  # noqa: ARG002 - there is none
        return ToolResult(error=f"There is no tool {name}.")


class AgentSessionFactory(ResourceSessionFactory[AgentRunSession]):
    """Makes a run of the agent of each prompt that TRL's worker gives it.

    Args:
        base_url: address of the service.
        agent: an async function, as `play_agent` takes it. The worker pickles it: it must be a function of a module.
        rows: the dataset: TRL gives prompts alone, by which the other fields of a sample are found here.
        sampling: the worker's sampling.
        task_name, env_columns: see `RowReader`.
        max_new_tokens: limit of each call that does not set its own.
        judge: the environment of the sample's task judges a run whose agent returned no reward.
        timeout_s: limit of one run. Its generations until then count as context; TRL leaves its reward out.
        connect: makes the client; by default `AsyncRolloutClient(base_url)`, with the key of `ROLLOUT_API_KEY`.
        session: further fields of `SessionRequest`, such as `limits` and `priority`.
    """

    def __init__(
        self,
        base_url: str,
        agent: Agent,
        *,
        rows: Iterable[Mapping[str, Any]],
        sampling: Mapping[str, float],
        task_name: str | None = None,
        env_columns: Sequence[str] = (),
        max_new_tokens: int | None = None,
        judge: bool = True,
        timeout_s: float | None = None,
        connect: Callable[[], AsyncRolloutClient] | None = None,
        **session: Any,
    ) -> None:
        self._agent = agent
        self._fields = fields_by_prompt(rows, RowReader(task_name, env_columns))
        sampled_by = {name: sampling[name] for name in SAMPLED_BY if name in sampling}
        bound = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        self._options = {"judge": judge, "timeout_s": timeout_s, "sampling": sampled_by | bound, **session}
        self._connect = connect or (lambda: AsyncRolloutClient(base_url))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent-sessions", daemon=True).start()
        self._client: AsyncRolloutClient | None = None

    def create(self, task: Prompt, seed: int | None = None, episode_id: str | None = None) -> AgentRunSession:
        """Begins a run. `seed` is the number of the group, `episode_id` the id of the sample.

        Raises:
            ValueError: the prompt is not in the dataset.
        """
        if (fields := self._fields.get(key := prompt_key(task))) is None:
            raise ValueError(f"A prompt of the worker is not in the dataset: {key[:200]}.")
        sample: JsonObject = {**fields, "messages": cast(Any, messages_of(task)), "idx": seed or 0, "id": episode_id}
        return AgentRunSession(asyncio.run_coroutine_threadsafe(self._played(sample), self._loop))

    async def _played(self, sample: JsonObject) -> AgentRollout:
        if self._client is None:
            self._client = self._connect()
        [[rollout]] = await play_agent(self._client, self._agent, [sample], **self._options)
        return rollout


def training_trace(samples: Sequence[SessionSample]) -> TrainingTrace:
    """Each response of a session's branches that may be trained once: its prompt, tokens and log-probabilities."""
    return TrainingTrace(turns=[turn for sample in samples for turn in turns_of(sample)])


def turns_of(sample: SessionSample) -> Iterable[TrainingTurn]:
    """Responses that may be trained and that no earlier branch has."""
    prompt: list[int] = []
    messages: list[JsonObject] = []
    generation_ids = iter(sample.generation_ids)
    for place, message in enumerate(sample.message_log):
        sent = chat_message(message)
        if message.generation_logprobs is not None:
            generation_id = next(generation_ids)
            if place not in sample.shared_messages and may_be_trained(message):
                yield TrainingTurn(
                    node_id=generation_id,
                    prompt_token_ids=list(prompt),
                    completion_token_ids=list(message.token_ids),
                    per_token_logps=list(message.generation_logprobs),
                    loss_mask=[0] * len(prompt) + [1] * len(message.token_ids),
                    request={"messages": list(messages)},
                    response={"choices": [{"message": sent, "finish_reason": message.finish_reason}]},
                )
        prompt += message.token_ids
        messages.append(sent)


def chat_message(message: Message) -> JsonObject:
    """The message in the form of chat completions."""
    content = message.content if message.parsed_content is None else message.parsed_content
    others = message.model_dump(include={"name", "tool_calls", "tool_call_id"}, exclude_none=True)
    return {"role": message.role, "content": content, **others}
