"""A generator that scores by a script."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.failures import RolloutFailure
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    ScoredPrompt,
    ScoringRequest,
    packed_ids,
    packed_logprobs,
)
from tests.service.scripted import ScriptedGenerator

Answer = str | RolloutFailure | None
"""The version that scores, why the scoring fails, or `None`: an update of the weights interrupts it."""


@dataclass
class ScoringGenerator(ScriptedGenerator):
    """The log-probability of a token is its negative id, and the most likely tokens are 0, 1, ... at -0, -1, ..."""

    answers: list[Answer] = field(default_factory=list)
    """One for each call; after the last one the version is 7."""
    before_each: Callable[[], None] = lambda: None

    async def generate(self, request: GenerationRequest) -> Generation:
        assert isinstance(request, ScoringRequest)
        self.requests.append(request)
        self.before_each()
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else "7"
        if isinstance(answer, RolloutFailure):
            raise answer
        if answer is None:
            return Generation((), (), "abort")
        asked = request.prompt_token_ids[max(request.start, 1) :]
        return ScoredPrompt(
            (),
            (),
            "length",
            prompt_logprobs=packed_logprobs(-token_id for token_id in asked),
            top_token_ids=packed_ids([*range(request.top_k)] * len(asked)),
            top_logprobs=packed_logprobs([-rank for rank in range(request.top_k)] * len(asked)),
            weight_version=answer,
        )
