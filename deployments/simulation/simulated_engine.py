"""An engine that only keeps the pace of one: token ids in, as many made-up ones out, as late as they would be."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from deployments.protocols import (
    Generation,
    GenerationRequest,
    GeneratorDescription,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.simulation.timing import TimedGenerations, Timing

WEIGHT_VERSION = "0"


class SimulatedEngine:
    """Implements the `Generator` protocol with one timer for all generations.

    A generation has all the tokens that it may have and ends by `length`. They are letters, whose ids follow from the
    prompt and the seed alone; each has the log-probability of a letter drawn evenly.
    """

    def __init__(self, pace: Timing, description: GeneratorDescription, letters: Sequence[int]) -> None:
        """`letters` are the token ids that responses are made of, at least one."""
        self._description = description
        self._under_way: TimedGenerations[asyncio.Future[None]] = TimedGenerations(pace)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_is_for: float | None = None
        self._letters = len(letters)
        # Long enough that each response is one slice, wherever it begins.
        self._cycle = packed_ids(letters) * (2 + description.max_model_len // len(letters))
        self._logprob = packed_logprobs([-math.log(len(letters))])

    @classmethod
    def start(cls, pace: Timing, model: str, tokenizer: str | None, max_model_len: int) -> Self:
        """Args: `model` and `tokenizer` are folders or hub names; of neither anything but the tokenizer is read."""
        name = tokenizer or model
        file = Path(name) / "tokenizer.json"
        loaded = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        vocabulary = loaded.get_vocab()
        letters = sorted(id_ for token, id_ in vocabulary.items() if token.isascii() and token.isalpha())
        return cls(pace, GeneratorDescription(model, max_model_len, max(vocabulary.values()) + 1), letters)

    async def generate(self, request: GenerationRequest) -> Generation:
        """BatchResults after as long as the pace says; cancelling it makes room for the next that waits."""
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        self._finish_ended()
        self._under_way.arrive(end, request.max_new_tokens, loop.time())
        self._finish_ended()
        try:
            if not end.done():
                await end
        except asyncio.CancelledError:
            self._finish_ended()
            self._under_way.drop(end, loop.time())
            self._finish_ended()
            raise
        return self._response(request)

    def describe(self) -> GeneratorDescription:
        return self._description

    @property
    def ongoing_generations(self) -> int:
        """Those that run or wait."""
        return len(self._under_way)

    def _finish_ended(self) -> None:
        """Wakes those whose time has come, and sets the timer on the next end."""
        loop = asyncio.get_running_loop()
        for end in self._under_way.ended(loop.time()):
            if not end.done():
                end.set_result(None)
        self._set_timer(self._under_way.next_end)

    def _set_timer(self, when: float | None) -> None:
        if when == self._timer_is_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_is_for = when
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer_is_for = None
        self._finish_ended()

    def _response(self, request: GenerationRequest) -> Generation:
        first = (sum(request.prompt_token_ids) + (request.sampling.seed or 0)) % self._letters
        length = request.max_new_tokens
        return Generation(
            token_ids=self._cycle[first : first + length],
            logprobs=self._logprob * length,
            finish_reason="length",
            weight_versions=(WeightSpan(WEIGHT_VERSION, 0, length),),
        )
