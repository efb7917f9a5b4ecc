"""An engine without a model: it answers each generation with made-up tokens after the time of a real one."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from deployments.protocols import (
    Engine,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    ReplicaLoad,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.simulation.timing import TimedGenerations, Timing

WEIGHT_VERSION = "0"


class SimulatedEngine(Engine):
    """Each generation has `max_new_tokens` tokens, ends by `length`, and takes as long as `timing` says.

    The tokens are letters; their ids depend on the prompt and the seed alone. The log-probability of each is that of a
    letter drawn with equal probabilities. One timer serves all generations.
    """

    def __init__(self, timing: Timing, description: GeneratorDescription, letters: Sequence[int]) -> None:
        """`letters` are the token ids that responses consist of, at least one."""
        self._description = description
        self._generations: TimedGenerations[asyncio.Future[None]] = TimedGenerations(timing)
        self._kv_tokens = 0
        """Of the prompts and the whole responses of the generations that run or wait."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at: float | None = None
        self._letters = len(letters)
        # So long that each response is one slice, whichever letter it begins with.
        self._cycle = packed_ids(letters) * (2 + description.max_model_len // len(letters))
        self._logprob = packed_logprobs([-math.log(len(letters))])

    @classmethod
    def start(cls, timing: Timing, model: str, tokenizer: str | None, max_model_len: int) -> Self:
        """`model` and `tokenizer` are folders or Hugging Face repositories; only the tokenizer is read.

        Raises:
            Exception: what the tokenizers library raises when there is no tokenizer.
        """
        name = tokenizer or model
        file = Path(name) / "tokenizer.json"
        loaded = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        vocabulary = loaded.get_vocab()
        letters = sorted(id_ for token, id_ in vocabulary.items() if token.isascii() and token.isalpha())
        return cls(timing, GeneratorDescription(model, max_model_len, max(vocabulary.values()) + 1), letters)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Returns when the generation's time has passed; cancelling the call lets the next waiting generation start."""
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        tokens = len(request.prompt_token_ids) + request.max_new_tokens
        self._wake_finished()
        self._generations.submit(end, request.max_new_tokens, loop.time())
        self._wake_finished()
        self._kv_tokens += tokens
        try:
            if not end.done():
                await end
        except asyncio.CancelledError:
            self._wake_finished()
            self._generations.cancel(end, loop.time())
            self._wake_finished()
            raise
        finally:
            self._kv_tokens -= tokens
        return self._response(request)

    def describe(self) -> GeneratorDescription:
        return self._description

    def load(self) -> ReplicaLoad:
        generations = self._generations
        return ReplicaLoad(len(generations), len(generations) - generations.running, self._kv_tokens)

    def _wake_finished(self) -> None:
        """Wakes the callers whose generations have ended, and sets the timer to the next end."""
        loop = asyncio.get_running_loop()
        for end in self._generations.pop_finished(loop.time()):
            if not end.done():
                end.set_result(None)
        self._set_timer(self._generations.next_end)

    def _set_timer(self, due_at: float | None) -> None:
        if due_at == self._timer_due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_at = due_at
        self._timer = None if due_at is None else asyncio.get_running_loop().call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_due_at = None
        self._wake_finished()

    def _response(self, request: GenerationRequest) -> Generation:
        first = (sum(request.prompt_token_ids) + (request.sampling.seed or 0)) % self._letters
        length = request.max_new_tokens
        return Generation(
            token_ids=self._cycle[first : first + length],
            logprobs=self._logprob * length,
            finish_reason="length",
            weight_versions=(WeightSpan(WEIGHT_VERSION, 0, length),),
        )
