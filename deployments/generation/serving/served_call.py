"""One call of a model server's API in its replica: what it asked, what the engine made for it, its failures."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm.exceptions import GracefulHTTPError

from deployments.failures import GenerationNotFinite, GenerationRejected, RolloutFailure, StoreFailure, VersionReplaced
from deployments.generation.engine_outputs import ColumnReader, GeneratedChoice
from deployments.generation.serving.session_call import SessionCall
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import (
    GENERATED,
    TOKEN_ENDPOINTS,
    WITH_SEVERAL_PROMPTS,
    ServedRequest,
    ServedTokens,
)
from deployments.sessions.records import ChatMessage

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


_STATUSES = {
    "policy": HTTPStatus.CONFLICT,
    "overload": HTTPStatus.TOO_MANY_REQUESTS,
    "internal": HTTPStatus.SERVICE_UNAVAILABLE,
}
"""By the kind of a failure."""


def refusal_of(failure: RolloutFailure | StoreFailure) -> GracefulHTTPError:
    if isinstance(failure, StoreFailure):
        return GracefulHTTPError(str(failure), HTTPStatus(failure.status))
    otherwise = HTTPStatus.SERVICE_UNAVAILABLE if failure.retryable else HTTPStatus.BAD_REQUEST
    return GracefulHTTPError(str(failure), _STATUSES.get(failure.kind, otherwise))


@contextmanager
def answered_failures() -> Iterator[None]:
    """Raises the failures of the block as vLLM's servers answer with them."""
    try:
        yield
    except (RolloutFailure, StoreFailure) as failure:
        raise refusal_of(failure) from failure


@dataclass(slots=True, eq=False)
class ServedCall:
    """Is noted by the recording client, and read by whoever answers."""

    request: ServedRequest
    session: SessionCall | None = None
    """The session's part of a call of a session."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each prompt, by the index of its first choice."""
    cached_tokens: int = 0
    """Tokens of its first prompt that the engine found in its prefix cache."""
    choices: dict[int, GeneratedChoice] = field(default_factory=dict)
    """By index in the answer."""
    has_begun: bool = False
    """Whether the caller was sent the beginning of the answer."""
    retryable_failure: RolloutFailure | None = None
    """Why another replica must make the call, from the beginning of its answer on."""
    engine_ended: asyncio.Event | None = None
    """`None` before the engine was called."""
    columns: ColumnReader | None = None
    """Once the engine was called for a session that includes some."""

    @property
    def is_generated(self) -> bool:
        return self.request.endpoint in GENERATED

    @property
    def keeps_logprobs(self) -> bool:
        return self.session is not None or self.request.endpoint in TOKEN_ENDPOINTS

    @property
    def tokens(self) -> ServedTokens:
        new = None if self.session is None else self.session.new_prompt_tokens
        context, generated = sum(self.prompts.values()), sum(len(each.token_ids) for each in self.choices.values())
        return ServedTokens(context if new is None else new, generated, context, self.cached_tokens)

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
        request = replace(
            self.request,
            generation_id=self.generation_id(first),
            prompt_token_ids=prompt_token_ids,
            max_new_tokens=max_tokens or 1,
            body=b"",
        )
        return request if self.session is None else self.session.continued(request)

    async def record(self, shown: Mapping[int, ChatMessage]) -> None:
        """Records a call of a session as `SessionCall.record` does, with its failures as vLLM's servers answer them."""
        if self.session is not None:
            with answered_failures():
                await self.session.record(shown, self.choices)

    def leave(self) -> None:
        """Ends a call whose answer nobody wants any longer. In a session it is recorded as far as it came."""
        if self.session is not None:
            self.session.leave(self.engine_ended, self.choices)

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
        self.cached_tokens = self.cached_tokens if first else output.num_cached_tokens or 0
        for completion in output.outputs:
            if not is_delta or first + completion.index not in self.choices:
                self.choices[first + completion.index] = GeneratedChoice()
            self.choices[first + completion.index].add(completion, self.keeps_logprobs, self.columns)


CURRENT_CALL: ContextVar[ServedCall] = ContextVar("CURRENT_CALL")
"""The call for which vLLM's layers work in this task."""
