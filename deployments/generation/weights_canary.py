"""The canary: fixed prompts that an engine plays with new weights before anybody else does, within a time limit.

Guarantees: weights with which the engine fails, or gives a log-probability that is not finite, are found out; so is an
adapter that is not zero and that the engine generates without. Weights that change no log-probability of the prompts
may be too small a change: the caller is told, and nothing fails. An engine that takes images is shown one, so that all
of this holds for its vision tower.
"""

import asyncio
import logging
import shutil
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar
from uuid import uuid4

from safetensors.torch import load_file, save_file
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.failures import GenerationLost, RolloutFailure
from deployments.generation.adapters import ADAPTER_FILE, Adapters, LoadedAdapter
from deployments.generation.engine_requests import generation_of
from deployments.generation.output_health import refuse_not_finite
from deployments.protocols.generation import GenerationRequest, SamplingOptions, packed_ids, packed_logprobs
from deployments.protocols.images import ImageSpan, ImageTokens

Result = TypeVar("Result")


async def with_timeout(canary: Awaitable[Result], timeout_s: float) -> Result:
    """Raises `GenerationLost` after `timeout_s` seconds; the canary is cancelled then."""
    try:
        async with asyncio.timeout(timeout_s):
            return await canary
    except TimeoutError:
        raise GenerationLost(f"The canary took longer than {timeout_s:g} s.") from None


logger = logging.getLogger("rollout_service.generation")
GenerateCanary: TypeAlias = "Callable[[GenerationRequest, LoadedAdapter | None, str], Awaitable[RequestOutput]]"
"""From the prompt, the adapter and the salt of its cache to the engine's last output."""
Logprobs: TypeAlias = "list[array[float]]"
"""Log-probabilities of the tokens of each prompt."""
REMEMBER_WITHIN_S = 3.0
"""An engine whose batch is full for longer goes on without the comparison: a push must not wait for its generations."""
AMPLIFIED = "amplified"
CANARY_IMAGE = "canary"
"""The name of the image that the engine's prompt shows."""
CANARY_PROMPTS = 4
CANARY_PROMPT_TOKENS = 16
CANARY_TOKENS = 4
"""Generated for each prompt."""
STEP = 7919
"""A prime: the ids of the prompts are spread over any vocabulary."""


class AdapterHasNoEffect(Exception):
    """The engine generates without the adapter, although it has loaded it."""


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

    async def remember(self) -> None:
        """Plays with the full weights, which are about to be changed. A failure is logged: nothing is compared then."""
        if self._remembered is not None and self._remembered[0] == self._swaps():
            return
        self._remembered = None
        try:
            await with_timeout(self._play_before_swap(), REMEMBER_WITHIN_S)
        except RolloutFailure as failure:
            logger.info("The new weights are not compared with those before: %s", failure)

    async def _play_before_swap(self) -> None:
        swaps, logprobs = self._swaps(), await self._play(None)
        self._remembered = swaps, logprobs

    async def try_current(self) -> bool:
        """Plays with what new generations would use, also during a trial of it.

        Returns:
            Whether it changes no log-probability, although it is not known to be the same as before.

        Raises:
            GenerationNotFinite: a log-probability is NaN or infinite.
            GenerationLost: the engine broke.
            AdapterHasNoEffect: as `try_adapter` does.
        """
        if self._adapters.current is not None:
            return await self.try_adapter(self._adapters.current)
        before = None if self._remembered is None else self._remembered[1]
        logprobs = logprobs_of(await self._outputs(None))
        self._remembered = self._swaps(), logprobs
        return logprobs == before

    async def try_adapter(self, adapter: LoadedAdapter) -> bool:
        """Plays with an adapter and, in the same steps of the engine, without it; raises as `try_current` does.

        Returns:
            Whether it is so small that it changes no log-probability, but is not zero.

        Raises:
            AdapterHasNoEffect: it changes none either with matrices that are as large as those of a trained one.
        """
        outputs, without = await asyncio.gather(self._outputs(adapter), self._play(None))
        if logprobs_of(outputs) != without:
            return False
        folder = Path(adapter.request.lora_path)
        larger = folder.with_name(f"{folder.name}@{AMPLIFIED}")
        try:
            if not await asyncio.to_thread(_write_amplified, folder, larger):
                return False
            async with self._adapters.borrowed(f"{adapter.label}@{AMPLIFIED}", larger) as amplified:
                played, without = await asyncio.gather(self._play(amplified), self._play(None))
        finally:
            await asyncio.to_thread(shutil.rmtree, larger, ignore_errors=True)
        if played == without:
            raise AdapterHasNoEffect(
                "The adapter is not zero, and the engine's log-probabilities are those of the weights without it."
            )
        return True

    async def _play(self, adapter: LoadedAdapter | None) -> Logprobs:
        """As the engine says them, finite or not."""
        return logprobs_of(await self._generate_all(adapter))

    async def _outputs(self, adapter: LoadedAdapter | None) -> list[RequestOutput]:
        outputs = await self._generate_all(adapter)
        for output in outputs:
            refuse_bad_canary(output)
        return outputs

    async def _generate_all(self, adapter: LoadedAdapter | None) -> list[RequestOutput]:
        # No rollout may find in the prefix cache what a version has computed that is refused afterwards.
        salt = uuid4().hex
        return await asyncio.gather(*(self._generate(prompt, adapter, salt) for prompt in self._prompts()))


def _write_amplified(folder: Path, larger: Path) -> bool:
    """Writes the adapter of `folder` with every matrix scaled to a largest value of 1.

    Returns:
        Whether it changes anything: if of each pair of matrices one is zero, nothing is written.
    """
    tensors = load_file(folder / ADAPTER_FILE)
    peaks = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in tensors.items()}
    ups = [name for name in tensors if "lora_B" in name or "lora_embedding_B" in name]
    downs = {name: name.replace("lora_B", "lora_A").replace("lora_embedding_B", "lora_embedding_A") for name in ups}
    if not any(peaks[up] and peaks.get(down, 0.0) for up, down in downs.items()):
        return False
    larger.mkdir(exist_ok=True)
    scaled = {name: (tensor.float() / (peaks[name] or 1.0)).contiguous() for name, tensor in tensors.items()}
    save_file(scaled, larger / ADAPTER_FILE)
    shutil.copyfile(folder / "adapter_config.json", larger / "adapter_config.json")
    return True


def canary_prompts(vocab_size: int, max_model_len: int, image: ImageTokens | None = None) -> list[GenerationRequest]:
    """Prompts of `CANARY_PROMPT_TOKENS` tokens, shorter for a model that does not take so many; always the same.

    Args:
        image: the tokens of `CANARY_IMAGE`, which one more prompt shows if the model takes so many.
    """
    length = max(min(CANARY_PROMPT_TOKENS, max_model_len - CANARY_TOKENS), 1)
    prompts = [
        packed_ids((prompt * CANARY_PROMPT_TOKENS + place + 1) * STEP % vocab_size for place in range(length))
        for prompt in range(CANARY_PROMPTS)
    ]
    requests = [GenerationRequest("canary", prompt, CANARY_TOKENS, (), SamplingOptions()) for prompt in prompts]
    if image is not None and len(image.token_ids) + length + CANARY_TOKENS <= max_model_len:
        shown = ImageSpan(CANARY_IMAGE, 0, len(image.token_ids))
        ids = packed_ids([*image.token_ids, *prompts[0]])
        requests.append(replace(requests[0], prompt_token_ids=ids, images=(shown,)))
    return requests


def canary_params(request: GenerationRequest) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if request.images else 1.0,
        ignore_eos=True,
        max_tokens=CANARY_TOKENS,
        detokenize=False,
        logprobs=0,
        # An image may have thousands of tokens, whose logits need memory that the engine has planned for nothing.
        prompt_logprobs=None if request.images else 0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def refuse_bad_canary(output: RequestOutput) -> None:
    """
    Raises:
        GenerationNotFinite: a log-probability of the prompt or of the generated tokens is NaN or infinite.
        GenerationLost: the generation was not finished.
    """
    if generation_of(output.outputs[0], None).finish_reason == "abort":
        raise GenerationLost("The engine ended the canary early.")
    refuse_not_finite(_compared_logprobs(output))


def logprobs_of(outputs: Sequence[RequestOutput]) -> Logprobs:
    return [_compared_logprobs(output) for output in outputs]


def _compared_logprobs(output: RequestOutput) -> "array[float]":
    """Those of the prompt, which are the same in each run; of the greedy tokens where the prompt has none."""
    said = output.outputs[0].logprobs if output.prompt_logprobs is None else output.prompt_logprobs
    return packed_logprobs(said.logprobs if isinstance(said, FlatLogprobs) else ())
