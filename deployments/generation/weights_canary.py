"""The canary: fixed prompts that an engine plays with new weights before anybody else does, within a time limit.

Guarantees: weights with which the engine fails, or gives a log-probability that is not finite, are found out. Weights
that change no log-probability of the prompts may be too small a change: the caller is told, and nothing fails.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar
from uuid import uuid4

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import GenerationLost
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.engine_requests import generation_of
from deployments.generation.health import refuse_not_finite
from deployments.protocols.generation import GenerationRequest, SamplingOptions, packed_ids, packed_logprobs

Result = TypeVar("Result")


async def with_timeout(canary: Awaitable[Result], timeout_s: float) -> Result:
    """Raises `GenerationLost` after `timeout_s` seconds; the canary is cancelled then."""
    try:
        async with asyncio.timeout(timeout_s):
            return await canary
    except TimeoutError:
        raise GenerationLost(f"The canary took longer than {timeout_s:g} s.") from None


GenerateCanary: TypeAlias = "Callable[[GenerationRequest, LoadedAdapter | None, str], Awaitable[RequestOutput]]"
"""From the prompt, the adapter and the salt of its cache to the engine's last output."""
Logprobs: TypeAlias = "list[array[float]]"
"""Log-probabilities of the tokens of each prompt."""
_CANARY_PROMPTS = 4
CANARY_PROMPT_TOKENS = 16
CANARY_TOKENS = 4
"""Generated for each prompt."""
_STEP = 7919
"""A prime: the ids of the prompts are spread over any vocabulary."""


class WeightsCanary:
    """Plays the prompts with weights, and compares what they say with what was loaded before.

    Args:
        swaps: counts the changes of the full weights.
    """

    def __init__(
        self,
        adapters: Adapters,
        generate: GenerateCanary,
        swaps: Callable[[], int],
        prompts: Callable[[], Sequence[GenerationRequest]],
    ) -> None:
        self._adapters = adapters
        self._generate = generate
        self._swaps = swaps
        self._prompts = prompts
        self._remembered: tuple[int, Logprobs] | None = None
        """Log-probabilities under full weights, and the number of changes until then."""

    async def try_current(self) -> bool:
        """Plays with what new generations would use, also during a trial of it.

        Returns:
            Whether it changes no log-probability. Only known of full weights if those before were played too.

        Raises:
            GenerationNotFinite: a log-probability is NaN or infinite.
            GenerationLost: the engine broke.
        """
        if self._adapters.current is not None:
            return await self.try_adapter(self._adapters.current)
        before, self._remembered = self._remembered, (self._swaps(), await self.play(None, is_checked=True))
        return before == (self._remembered[0] - 1, self._remembered[1])

    async def try_adapter(self, adapter: LoadedAdapter) -> bool:
        """Plays with an adapter and, in the same steps of the engine, without it; raises as `try_current` does.

        Returns:
            Whether it changes no log-probability.
        """
        logprobs, without = await asyncio.gather(self.play(adapter, is_checked=True), self.play(None))
        return logprobs == without

    async def play(self, adapter: LoadedAdapter | None, is_checked: bool = False) -> Logprobs:
        """Log-probabilities of the prompts and of what follows them, finite or not, with an adapter or without.

        Args:
            is_checked: raises as `_refuse_bad_canary` does.
        """
        # No rollout may find in the prefix cache what a version has computed that is refused afterwards.
        salt = uuid4().hex
        outputs = await asyncio.gather(*(self._generate(prompt, adapter, salt) for prompt in self._prompts()))
        for output in outputs if is_checked else ():
            _refuse_bad_canary(output)
        return [_prompt_logprobs(output) for output in outputs]


def canary_prompts(vocab_size: int, max_model_len: int) -> list[GenerationRequest]:
    """Prompts of `CANARY_PROMPT_TOKENS` tokens, shorter for a model that does not take so many; always the same."""
    length = max(min(CANARY_PROMPT_TOKENS, max_model_len - CANARY_TOKENS), 1)
    prompts = [
        packed_ids((prompt * CANARY_PROMPT_TOKENS + place + 1) * _STEP % vocab_size for place in range(length))
        for prompt in range(_CANARY_PROMPTS)
    ]
    return [GenerationRequest("canary", prompt, CANARY_TOKENS, (), SamplingOptions()) for prompt in prompts]


def canary_params() -> SamplingParams:
    return SamplingParams(
        ignore_eos=True,
        max_tokens=CANARY_TOKENS,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _refuse_bad_canary(output: RequestOutput) -> None:
    """
    Raises:
        GenerationNotFinite: a log-probability of the prompt or of the generated tokens is NaN or infinite.
        GenerationLost: the generation was not finished.
    """
    if generation_of(output.outputs[0], None).finish_reason == "abort":
        raise GenerationLost("The engine ended the canary early.")
    refuse_not_finite(_prompt_logprobs(output))


def _prompt_logprobs(output: RequestOutput) -> "array[float]":
    said = output.prompt_logprobs
    return packed_logprobs(said.logprobs if isinstance(said, FlatLogprobs) else ())
