"""From a request to its episodes: everything that can be wrong with it is found here, before anything starts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from deployments.failures import PromptRejected, failure_of
from deployments.protocols import GeneratorDescription, SamplingOptions
from rollout_client.contract import Message, RolloutRequest, SampleInput, SampleResult, Sampling
from rollout_client.problem_contract import FieldProblem
from service.requests.chat_tokenizer import RENDERING_ARGUMENTS, TransformersChatTokenizer
from service.responses.problems import invalid_request, unknown_task
from service.rollouts.chat_tokenizer import ChatOptions
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart
from service.rollouts.seeds import derived_seed
from service.settings import Limits

RESULT_FIELDS = SampleResult.model_fields.keys()


@dataclass(frozen=True, slots=True)
class EpisodeFactory:
    """What this service can play: its tasks, its model's limits, its own limits."""

    task_names: frozenset[str]
    generator: GeneratorDescription
    tokens: TransformersChatTokenizer
    limits: Limits

    def episodes(self, request: RolloutRequest, request_id: str) -> list[Episode]:
        """Makes the episodes of a request, sample by sample, the rollouts of one sample next to each other.

        A prompt that cannot be rendered is an episode that has failed already; its siblings play.

        Raises:
            RequestProblem: the request asks for what this service does not have.
        """
        if problems := list(self._problems(request)):
            raise invalid_request(*problems)
        return [
            episode
            for sample_position, sample in enumerate(request.samples)
            for episode in self._group(request, request_id, sample_position, sample)
        ]

    def _problems(self, request: RolloutRequest) -> Iterator[FieldProblem]:
        if len(request.samples) * request.num_generations > self.limits.max_rollouts_per_request:
            yield FieldProblem(
                field="samples",
                message=f"{len(request.samples)} samples x {request.num_generations} generations is more than "
                f"{self.limits.max_rollouts_per_request} rollouts; split the request",
            )
        if (request.max_seq_len or 0) > self.generator.max_model_len:
            yield FieldProblem(
                field="max_seq_len",
                message=f"the model takes at most {self.generator.max_model_len} tokens; ask for no more",
                value=request.max_seq_len,
            )
        if (request.keep.per_group or 0) > request.num_generations:
            yield FieldProblem(
                field="keep.per_group",
                message=f"a group has only {request.num_generations} rollouts; keep fewer or raise num_generations",
                value=request.keep.per_group,
            )
        if (request.keep.groups or 0) > len(request.samples):
            yield FieldProblem(
                field="keep.groups",
                message=f"there are only {len(request.samples)} groups, one a sample; keep fewer",
                value=request.keep.groups,
            )
        yield from template_problems("chat_template_kwargs", request.chat_template_kwargs)
        for position, sample in enumerate(request.samples):
            yield from self._sample_problems(f"samples[{position}]", sample)

    def _sample_problems(self, field: str, sample: SampleInput) -> Iterator[FieldProblem]:
        if sample.task_name not in self.task_names:
            yield unknown_task(f"{field}.task_name", sample.task_name, self.task_names)
        yield from template_problems(f"{field}.chat_template_kwargs", sample.chat_template_kwargs)
        for name in ("extra_env_info", *(sample.model_extra or {})):
            if holds_non_finite(getattr(sample, name)):
                yield FieldProblem(
                    field=f"{field}.{name}", message="it holds NaN or infinity, which JSON has no word for; send null"
                )
        for name in RESULT_FIELDS & (sample.model_extra or {}).keys():
            yield FieldProblem(
                field=f"{field}.{name}", message="this is a field of the result; give the further field another name"
            )
        if sample.message_log and not any(message.token_ids for message in sample.message_log):
            yield FieldProblem(field=f"{field}.message_log", message="it has no token at all; send at least one")
        for index, message in enumerate(sample.message_log or ()):
            yield from self._message_problems(f"{field}.message_log[{index}]", message)

    def _message_problems(self, field: str, message: Message) -> Iterator[FieldProblem]:
        highest = max(message.token_ids, default=0)
        if highest >= self.generator.vocab_size:
            yield FieldProblem(
                field=f"{field}.token_ids[{message.token_ids.index(highest)}]",
                message=f"{highest} is no token of the model; its ids are 0 to {self.generator.vocab_size - 1}",
                value=highest,
            )

    def _group(
        self, request: RolloutRequest, request_id: str, sample_position: int, sample: SampleInput
    ) -> Iterator[Episode]:
        failure: PromptRejected | None = None
        max_seq_len = request.max_seq_len or self.generator.max_model_len
        chat = chat_options(request, sample)
        try:
            message_log = self._message_log(sample, chat, max_seq_len)
        except PromptRejected as error:
            message_log, failure = [], error
        limits = EpisodeLimits(
            max_seq_len=max_seq_len,
            max_new_tokens=request.sampling.max_new_tokens,
            max_rollout_turns=request.max_rollout_turns,
            retries=request.retries,
        )
        stop_strings = request.sampling.stop_strings if sample.stop_strings is None else sample.stop_strings
        for generation_index in range(request.num_generations):
            episode = Episode(
                EpisodeIdentity(
                    request_id=request_id,
                    position=sample_position * request.num_generations + generation_index,
                    group=sample_position,
                    generation_index=generation_index,
                    idx=sample_position if sample.idx is None else sample.idx,
                    task_name=sample.task_name,
                    id=sample.id,
                    further_fields=sample.model_extra or {},
                ),
                EpisodeStart(
                    message_log=tuple(message_log),
                    extra_env_info=sample.extra_env_info,
                    stop_strings=tuple(stop_strings),
                    sampling=sampling_options(
                        request.sampling, group_seed(request, sample_position, sample), generation_index
                    ),
                    chat=chat,
                    min_weight_version=max(request.policy.min_version or 0, request.policy.version or 0),
                ),
                limits,
                self.tokens,
            )
            if failure is not None:
                episode.fail(failure_of(failure))
            yield episode

    def _message_log(self, sample: SampleInput, chat: ChatOptions, max_seq_len: int) -> Sequence[Message]:
        """The prompt with its tokens; raises `PromptRejected` where it is longer than `max_seq_len`."""
        if sample.message_log is not None:
            message_log: Sequence[Message] = sample.message_log
        else:
            message_log = self.tokens.prompt(sample.messages or [], chat, max_seq_len)
        length = sum(len(message.token_ids) for message in message_log)
        if length > max_seq_len:
            raise PromptRejected(
                f"The prompt has {length} tokens and max_seq_len is {max_seq_len}: "
                "shorten the prompt or raise max_seq_len."
            )
        return message_log


def template_problems(field: str, chat_template_kwargs: dict[str, JsonValue] | None) -> Iterator[FieldProblem]:
    for name in RENDERING_ARGUMENTS & (chat_template_kwargs or {}).keys():
        yield FieldProblem(field=f"{field}.{name}", message="this is the service's own to say; leave it out")


def chat_options(request: RolloutRequest, sample: SampleInput) -> ChatOptions:
    given = (sample.chat_template_kwargs, request.chat_template_kwargs)
    return ChatOptions(
        observation_format=sample.observation_format
        or request.observation_format
        or ("chat" if sample.messages else "raw"),
        tools=sample.tools,
        chat_template_kwargs=next((kwargs for kwargs in given if kwargs is not None), None),
    )


def group_seed(request: RolloutRequest, sample_position: int, sample: SampleInput) -> int | None:
    """A sample's own seed stands for itself, wherever the sample is; the request's is spread over its samples."""
    if sample.seed is not None:
        return sample.seed
    return None if request.sampling.seed is None else derived_seed(request.sampling.seed, sample_position)


def sampling_options(sampling: Sampling, seed: int | None, generation_index: int) -> SamplingOptions:
    return SamplingOptions(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        ignore_eos=sampling.ignore_eos,
        seed=None if seed is None else derived_seed(seed, generation_index),
    )


def holds_non_finite(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return any(map(holds_non_finite, value.values()))
    if isinstance(value, list):
        return any(map(holds_non_finite, value))
    return isinstance(value, float) and not math.isfinite(value)
