"""Makes the episodes of a valid request: renders and tokenizes its prompts, and resolves its options per rollout."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any
from uuid import uuid4

from deployments.agents.settings import AgentSettings
from deployments.chat.chat_tokenizer import TransformersChatTokenizer, refuse_too_many
from deployments.failures import PromptRejected, RolloutFailure, failure_of
from deployments.protocols.chat import ChatOptions
from deployments.protocols.environments import TaskDescription
from deployments.protocols.generation import (
    IncludedColumns,
    RequestShare,
    SamplingOptions,
    derived_seed,
    included_columns,
)
from deployments.protocols.images import ImageTokens
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.messages import Branch, Message
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, Sampling
from rollout_client.contract.sessions import SessionRequest
from service.access.keys import ANYBODY, Caller
from service.problems import MOST_PROBLEMS, invalid_request
from service.rollout_requests.sample_preparation import TaskDescriptions, tasks_with_start
from service.rollout_requests.validation import Capabilities, request_problems
from service.rollouts.agent_episode import AgentEpisode, AgentTask
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart, Prompt, ServiceBuild
from service.rollouts.message_log import MessageLog
from service.rollouts.messages import log_without_open_stop_string
from service.rollouts.staleness import VersionBounds
from service.scheduling.fair_queue import share_of
from service.settings import RequestLimits

logger = logging.getLogger("rollout_service.requests")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # A source tree that was never installed has no metadata.
        return "unknown"


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that was checked, and the objects that all of its episodes share."""

    request: RolloutRequest
    request_id: str
    """Chosen by the caller, who may use one twice. The id of `share` is unique."""
    tasks: TaskDescriptions
    share: RequestShare
    bounds: VersionBounds
    include: IncludedColumns

    @classmethod
    def of(
        cls, request: RolloutRequest, request_id: str, tasks: TaskDescriptions, caller: Caller = ANYBODY
    ) -> "ValidRequest":
        policy = request.policy
        share = share_of(f"{request_id}-{uuid4().hex[:16]}", request.priority, caller)
        bounds = VersionBounds(policy.version, policy.max_staleness, policy=policy.name)
        return cls(request, request_id, tasks, share, bounds, included_columns(request.include))


@dataclass(frozen=True, slots=True)
class EpisodeFactory:
    """Makes the episodes of requests to a service that plays `task_names` with one model."""

    task_names: frozenset[str]
    generator: GeneratorDescription
    tokenizer: TransformersChatTokenizer
    limits: RequestLimits
    agents: Mapping[str, AgentSettings] = field(default_factory=dict)
    """By task."""
    keeps_states: bool = False
    """Whether episodes keep the states of their environments by turn, for the records of rollouts."""

    def refuse_invalid(self, request: RolloutRequest, tasks: TaskDescriptions) -> None:
        """Raises `RequestProblem`, 422 with the first problems of the request, if there are any."""
        described = [task for task in tasks.values() if isinstance(task, TaskDescription)]
        capabilities = Capabilities(
            self.task_names,
            self.generator,
            self.limits,
            tasks_with_start(tasks),
            self.agents.keys(),
            {task.task_name for task in described if task.has_sessions and not task.forks_sessions},
        )
        if problems := list(islice(request_problems(request, capabilities), MOST_PROBLEMS)):
            raise invalid_request(*problems)

    def groups(
        self,
        valid: ValidRequest,
        places: Iterable[int],
        not_started: Mapping[int, RolloutFailure],
        images: dict[str, ImageTokens],
    ) -> list[Episode]:
        """The episodes of the samples at these places, the rollouts of one sample next to each other.

        An episode whose prompt cannot be rendered, or whose task is a failure, has failed already; the others can be
        played.

        Args:
            not_started: the samples whose start has failed, by place.
            images: the tokens of all images of the others' messages, to which those of observations are added.
        """
        return [episode for place in places for episode in self._group(valid, place, not_started.get(place), images)]

    def _group(
        self, valid: ValidRequest, place: int, not_started: RolloutFailure | None, images: dict[str, ImageTokens]
    ) -> Iterator[Episode]:
        """The episodes of one sample, which share all objects that do not differ between them."""
        request = valid.request
        sample = request.samples[place]
        idx = place if sample.idx is None else sample.idx
        max_seq_len = request.max_seq_len or self.generator.max_model_len
        task = not_started or valid.tasks.get(sample.task_name)
        failure = task if isinstance(task, RolloutFailure) else None
        described = task if isinstance(task, TaskDescription) else None
        chat = replace(_chat_options(request, sample, described), images=images)
        message_log: Sequence[Message] = ()
        agent = self.agents.get(sample.task_name)
        stop_strings = tuple(_stop_strings_of(request, sample))
        limits = EpisodeLimits(
            max_seq_len=max_seq_len,
            max_new_tokens=request.sampling.max_new_tokens,
            max_rollout_turns=request.max_rollout_turns,
            retries=request.retries,
        )
        if failure is None and agent is None:
            try:
                message_log = self._message_log(sample, chat, max_seq_len, stop_strings)
                if request.history == "template" and sample.message_log is not None:
                    sample, message_log = self._rendered(sample, message_log, chat, limits)
            except PromptRejected as error:
                failure = error
                extra = {"request_id": valid.request_id, "task_name": sample.task_name, "sample": idx}
                logger.warning("A prompt was rejected; its rollouts end as errors.", exc_info=error, extra=extra)
        start = EpisodeStart(
            prompt=Prompt.of(message_log, request.policy.name, sample),
            extra_env_info=sample.extra_env_info,
            stop_strings=stop_strings,
            sampling=_sampling_options(request.sampling),
            chat=chat,
            renders=request.history == "template",
            min_weight_version=max(request.policy.min_version or 0, request.policy.version or 0),
            bounds=valid.bounds,
            share=valid.share,
            include=valid.include,
            build=build_of(self.generator.settings_hash),
            keeps_states=self.keeps_states,
            forks_sessions=described is not None and described.forks_sessions,
        )
        seed = _group_seed(request, place, sample)
        agent_task = None if agent is None else _agent_task_of(agent, request, sample, seed)
        for generation_index in range(request.num_generations):
            identity = EpisodeIdentity(
                request_id=valid.request_id,
                unique_request_id=valid.share.id,
                position=place * request.num_generations + generation_index,
                group=place,
                generation_index=generation_index,
                idx=idx,
                task_name=sample.task_name,
                id=sample.id,
                parent=None if sample.fork is None else sample.fork.rollout,
                further_fields=sample.model_extra or {},
            )
            seeded_start = _seeded(start, seed, generation_index)
            if agent_task is None:
                episode = Episode(identity, seeded_start, limits, self.tokenizer)
            else:
                episode = AgentEpisode(identity, seeded_start, limits, self.tokenizer, agent_task)
            if failure is not None:
                episode.fail(failure_of(failure))
            yield episode

    def _message_log(
        self, sample: SampleInput, chat: ChatOptions, max_seq_len: int, stop_strings: Sequence[str]
    ) -> Sequence[Message]:
        """The prompt with its tokens; a partial response at its end only up to what could begin a stop string.

        Raises:
            PromptRejected: it cannot be rendered, has more than `max_seq_len` tokens, or none that stay.
        """
        if sample.message_log is not None:
            message_log: Sequence[Message] = sample.message_log
        elif not sample.messages:
            raise PromptRejected("The sample has no messages, and its environment's start added none.")
        else:
            message_log = self.tokenizer.prompt(sample.messages, chat, max_seq_len)
        refuse_too_many(sum(len(message.token_ids) for message in message_log), max_seq_len)
        closed = log_without_open_stop_string(message_log, stop_strings, self.tokenizer)
        if not any(message.token_ids for message in closed):
            raise PromptRejected(
                "message_log is a partial response alone, whose text could begin one of stop_strings, so none of its "
                "tokens stays: post the messages before it too."
            )
        return closed

    def _rendered(self, sample: SampleInput, log: Sequence[Message], chat: ChatOptions, limits: EpisodeLimits) -> Any:
        """The log with which the next turn begins, and the sample with what it has left for it."""
        prompt = Prompt.of(log)
        goes_on = prompt.turns and prompt.response is None
        if not (goes_on and (rendered := MessageLog(prompt, limits).rendered((), chat, self.tokenizer))):
            return sample, log
        end = 1 + max(place for place, message in enumerate(log) if message.generation_logprobs is not None)
        branches = [*sample.branches, Branch.model_construct(message_log=log[:end])]
        return sample.model_copy(update={"branches": branches}), rendered


@cache
def build_of(settings_hash: str) -> ServiceBuild:
    return ServiceBuild(version_of("rollout-service"), settings_hash)


def _agent_task_of(agent: AgentSettings, request: RolloutRequest, sample: SampleInput, seed: int | None) -> AgentTask:
    """The task with which the rollouts of the sample open their sessions."""
    limits = agent.limits
    if "max_rollout_turns" in request.model_fields_set:
        limits = limits.model_copy(update={"max_calls": min(limits.max_calls, request.max_rollout_turns)})
    sampling = request.sampling.model_copy(update={"seed": seed, "stop_strings": _stop_strings_of(request, sample)})
    # A field that is not set is not stored either.
    further: dict[str, Any] = {"include": request.include} if request.include else {}
    session = SessionRequest(
        sample=sample, sampling=sampling, policy=request.policy, priority=request.priority, limits=limits, **further
    )
    return AgentTask(session, agent.scored_by)


def _chat_options(request: RolloutRequest, sample: SampleInput, task: TaskDescription | None = None) -> ChatOptions:
    """The sample's own options, where it has them; otherwise those of request or task, otherwise the defaults."""
    given = (sample.chat_template_kwargs, request.chat_template_kwargs)
    return ChatOptions(
        observation_format=sample.observation_format
        or request.observation_format
        or ("chat" if sample.message_log is None or request.history == "template" else "raw"),
        tools=(list(task.tools if task else ()) or None) if sample.tools is None else sample.tools,
        chat_template_kwargs=next((kwargs for kwargs in given if kwargs is not None), None),
        has_observations=task is not None and task.has_start,
    )


def _stop_strings_of(request: RolloutRequest, sample: SampleInput) -> Sequence[str]:
    return request.sampling.stop_strings if sample.stop_strings is None else sample.stop_strings


def _group_seed(request: RolloutRequest, sample_position: int, sample: SampleInput) -> int | None:
    """The seed of a group. A sample's own seed does not depend on the sample's position; the request's seed does."""
    if sample.seed is not None:
        return sample.seed
    return None if request.sampling.seed is None else derived_seed(request.sampling.seed, sample_position)


def _sampling_options(sampling: Sampling) -> SamplingOptions:
    """The options without a seed, which each rollout has for itself."""
    return SamplingOptions(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        ignore_eos=sampling.ignore_eos,
    )


def _seeded(start: EpisodeStart, seed: int | None, generation_index: int) -> EpisodeStart:
    """The start of one rollout of a group. `seed` is the group's; without one, all rollouts have the same start."""
    if seed is None:
        return start
    return replace(start, sampling=replace(start.sampling, seed=derived_seed(seed, generation_index)))
