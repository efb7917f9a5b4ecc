"""One call of a model server's API in its replica: what it asked, and what the engine made for it."""

import asyncio
from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.logprobs import FlatLogprobs

from deployments.failures import GenerationNotFinite, GenerationRejected, RolloutFailure, VersionReplaced
from deployments.generation.engine_requests import expert_column, logprob_columns, whole_positions
from deployments.generation.output_health import refuse_not_finite
from deployments.protocols.generation import GenerationRequest, WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.model_server import (
    GENERATED,
    TOKEN_ENDPOINTS,
    WITH_SEVERAL_PROMPTS,
    ServedRequest,
    ServedTokens,
)
from deployments.protocols.token_columns import Columns, all_rows
from rollout_client.contract.messages import PackedNumbers, SampledWith

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

    from deployments.generation.serving.session_call import SessionCall


@dataclass(slots=True)
class GeneratedChoice:
    """Tokens that the engine has generated so far for one choice of a call."""

    token_ids: "array[int]" = field(default_factory=lambda: packed_ids(()))
    logprobs: "array[float]" = field(default_factory=lambda: packed_logprobs(()))
    """One for each id, in calls of a session and in those that show ids."""
    finish_reason: str | None = None
    """Once the engine has ended it."""
    weight_versions: tuple[WeightSpan, ...] = ()
    """Likewise; before that those up to the last update of the weights that has interrupted it."""
    parts: list[Columns] = field(default_factory=list)
    """The columns of each output, in calls of a session that includes some."""
    experts: Columns = field(default_factory=dict)
    """The column of its routed experts, once the engine has ended it."""

    @property
    def columns(self) -> dict[str, PackedNumbers]:
        return {**all_rows(self.parts), **self.experts}


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads the columns that a session includes out of the engine's outputs for one of its calls."""

    request: GenerationRequest
    """With what it includes, its `top_k` and the first token whose experts are due."""
    named: int
    """How many of the likeliest tokens the engine names for each one."""
    experts: int
    """How many experts a layer of the model has."""

    def read(self, choice: GeneratedChoice, completion: "CompletionOutput") -> None:
        """Adds those of an output to a choice that does not have its tokens yet. Raises as `generation_of`."""
        if self.named and isinstance(flat := completion.logprobs, FlatLogprobs) and len(flat):
            choice.parts.append(logprob_columns(self.request, whole_positions(flat, self.named), self.named))
        if completion.finished():
            tokens = len(choice.token_ids) + len(completion.token_ids)
            choice.experts = expert_column(self.request, completion.routed_experts, tokens, self.experts)
            # They are the session's: an agent that has not asked for megabytes is not sent them.
            completion.routed_experts = None


@dataclass(slots=True, eq=False)
class ServedCall:
    """Is noted by the recording client, and read by whoever answers."""

    request: ServedRequest
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each prompt, by the index of its first choice."""
    choices: dict[int, GeneratedChoice] = field(default_factory=dict)
    """By index in the answer."""
    has_begun: bool = False
    """Whether the caller was sent the beginning of the answer."""
    retryable_failure: RolloutFailure | None = None
    """Why another replica must make the call, from the beginning of its answer on."""
    engine_ended: asyncio.Event | None = None
    """`None` before the engine was called."""
    session: "SessionCall | None" = None
    """The session's part of a call of a session."""
    is_constrained: bool = False
    """Whether it makes tokens more or less likely whatever the policy says (`sampling_marks.py`)."""
    sampled_with: SampledWith | None = None
    """The distribution that it samples from, if it is not the session's."""
    oldest_version: int | None = None
    """Oldest version that generated a part of the prompt."""
    new_prompt_tokens: int | None = None
    """Those that the session does not have yet; by default all."""
    experts_from: int = 0
    """The first token of the prompt whose routed experts the session does not have."""
    columns: "ColumnReader | None" = None
    """Once the engine was called for a session that includes some."""

    @property
    def is_generated(self) -> bool:
        return self.request.endpoint in GENERATED

    @property
    def keeps_logprobs(self) -> bool:
        return self.session is not None or self.request.endpoint in TOKEN_ENDPOINTS

    @property
    def tokens(self) -> ServedTokens:
        new = sum(self.prompts.values()) if self.new_prompt_tokens is None else self.new_prompt_tokens
        return ServedTokens(new, sum(len(choice.token_ids) for choice in self.choices.values()))

    def begin_prompt(self, choices: int) -> int:
        """The index of the first of so many choices of a prompt."""
        first = len(self.prompts) * choices if self.request.endpoint in WITH_SEVERAL_PROMPTS else 0
        self.prompts[first] = 0
        return first

    def generation_id(self, first: int) -> str:
        """The id of the generations of a prompt. Args: `first` as `begin_prompt` returned it."""
        return f"{self.request.generation_id}-{first}" if first else self.request.generation_id

    def generation(self, prompt_token_ids: list[int], max_tokens: int | None, first: int = 0) -> GenerationRequest:
        """The request to the engine beside the prompt and vLLM's parameters.

        Args:
            first: as `begin_prompt` returned it. Each prompt can be interrupted without the others.
        """
        return replace(
            self.request,
            generation_id=self.generation_id(first),
            prompt_token_ids=prompt_token_ids,
            max_new_tokens=max_tokens or 1,
            oldest_version=self.oldest_version,
            experts_from=self.experts_from,
            body=b"",
        )

    def note_failure(self, failure: RolloutFailure) -> None:
        """The engine does not generate, or not to the end. What is made anew, or must not count, is dropped."""
        if failure.retryable and not self.has_begun:
            self.retryable_failure = failure
            self.choices.clear()
        elif isinstance(failure, VersionReplaced | GenerationNotFinite | GenerationRejected):
            self.choices.clear()

    def note(self, output: "RequestOutput", is_delta: bool, first: int) -> None:
        """Notes what the engine has made, and what the session includes of it.

        Args:
            is_delta: whether the output has only the tokens since the one before.
            first: as `begin_prompt` returned it.

        Raises:
            GenerationNotFinite: a log-probability that is kept is NaN or infinite.
            GenerationLost, GenerationRejected: in a session that includes columns, as `generation_of` raises them.
        """
        self.prompts[first] = len(output.prompt_token_ids or ())
        for completion in output.outputs:
            choice = self.choices.setdefault(first + completion.index, GeneratedChoice())
            if not is_delta:
                choice.token_ids, choice.logprobs, choice.parts = packed_ids(()), packed_logprobs(()), []
            if self.columns is not None:
                self.columns.read(choice, completion)
            choice.token_ids.extend(completion.token_ids)
            if completion.logprobs is not None and self.keeps_logprobs:
                logprobs = packed_logprobs(sampled_logprobs(completion.logprobs, completion.token_ids))
                refuse_not_finite(logprobs)
                choice.logprobs.extend(logprobs)
            if completion.finish_reason is not None:
                choice.finish_reason = completion.finish_reason
            if (spans := completion.weight_versions) is not None:
                choice.weight_versions = tuple(WeightSpan(span.version, span.start, span.end) for span in spans)


def sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Those of the sampled tokens, in either of vLLM's forms; in the flat one each position begins with them."""
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        return [logprobs.logprobs[start] for start in starts]
    return [position[token_id].logprob for position, token_id in zip(logprobs, token_ids, strict=True)]


CURRENT_CALL: ContextVar[ServedCall] = ContextVar("CURRENT_CALL")
"""The call for which vLLM's layers work in this task."""
