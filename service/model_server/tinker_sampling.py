"""Carries out Tinker's `asample`: a text completion samples, `/score` says the log-probabilities of the prompt."""

import asyncio
import logging
from contextlib import aclosing
from http import HTTPStatus

import orjson
from pydantic_core import from_json

from deployments.failures import GenerationLost, RolloutFailure
from deployments.protocols.generation import ScoredPrompt
from rollout_client.contract.rollouts import SampleError
from service.access.keys import Caller
from service.http.request_body import JSON
from service.model_server.call_bodies import MOST_BYTES_INLINE
from service.model_server.calls import ModelCalls
from service.model_server.futures import FutureAnswer, Futures, future_lost
from service.model_server.tinker_dialect import SampleCall, sample_result
from service.problems import problem_of
from service.scheduling.priority import share_of
from service.scoring.scoring import Score, Scoring

_PROTOBUF = "application/x-protobuf"
logger = logging.getLogger("rollout_service.tinker")


class _SampleRefused(Exception):
    """The engine refuses the call as it is, with a sentence."""


class TinkerSampling:
    """Samples for Tinker's clients in one ingress replica."""

    def __init__(self, calls: ModelCalls, scoring: Scoring) -> None:
        self.futures = Futures()
        self._calls = calls
        self._scoring = scoring

    async def answer(self, call: SampleCall, request_id: str, caller: Caller) -> FutureAnswer:
        """The samples, or why there are none and will be none.

        Raises:
            RequestProblem: 410, the same call can succeed: its client sends it again.
        """
        try:
            return FutureAnswer(await self._sampled(call, request_id, caller), _PROTOBUF)
        except Exception as error:
            log_fields = {"request_id": request_id}
            if isinstance(error, RolloutFailure) and error.retryable:
                logger.warning("A call of Tinker's API is to be sent again: %s", error, extra=log_fields)
                raise future_lost(f"{error} Send the call again", call.name) from error
            is_users = isinstance(error, _SampleRefused | RolloutFailure)
            problem = problem_of(error).problem
            if not is_users and problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("A call of Tinker's API failed unexpectedly.", exc_info=error, extra=log_fields)
                return _failed(problem.detail or problem.title, "server")
            return _failed(str(error), "user")

    async def _sampled(self, call: SampleCall, request_id: str, caller: Caller) -> bytes:
        # Scored first: that leaves the prompt in the prefix cache.
        score = await self._scored(call, request_id, caller)
        share = share_of(f"tinker-{call.sampler.session}", call.sampler.priority, caller)
        answer = await self._calls.answer(
            "completions",
            call.completion(),
            request_id,
            caller,
            choices=call.choices,
            demand=call.sampler.demand,
            share=share,
        )
        async with aclosing(answer):
            completion = b"".join([part async for part in answer.body])
        if answer.status != HTTPStatus.OK:
            raise _SampleRefused(_refusal_in(completion))
        if len(completion) <= MOST_BYTES_INLINE:
            return sample_result(call, completion, score)
        return await asyncio.to_thread(sample_result, call, completion, score)

    async def _scored(self, call: SampleCall, request_id: str, caller: Caller) -> ScoredPrompt | None:
        if call.score is None:
            return None
        scores = list[Score]()

        async def keep(_: int, score: Score) -> None:
            scores.append(score)

        await self._scoring.score(call.score, request_id, keep, caller)
        [score] = scores
        if isinstance(score, SampleError):
            raise GenerationLost(score.message) if score.retryable else _SampleRefused(score.message)
        return score


def _refusal_in(completion: bytes) -> str:
    """The sentence in the refusal of a model server."""
    try:
        return str(from_json(completion)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return completion.decode(errors="replace")


def _failed(message: str, category: str) -> FutureAnswer:
    return FutureAnswer(orjson.dumps({"error": message, "category": category}), JSON)
