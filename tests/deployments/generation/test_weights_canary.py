"""What the canary generates, what fails it, and what it sees of a change of the weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from deployments.failures import GenerationLost, GenerationNotFinite
from deployments.generation.adapters import Adapters, LoadedAdapter
from deployments.generation.weights_canary import CANARY_PROMPT_TOKENS, CANARY_TOKENS, WeightsCanary, canary_prompts
from deployments.protocols.generation import GenerationRequest
from tests.fakes.async_llm import ScriptedLLM, adapter_folder
from tests.virtual_time import synchronous

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def flat(*logprobs: float) -> FlatLogprobs:
    values = FlatLogprobs()
    values.logprobs = list(logprobs)
    return values


def output(generated: list[float], prompt: list[float], finish_reason: str = "length") -> RequestOutput:
    ids = list(range(len(generated)))
    completion = CompletionOutput(0, "", ids, None, flat(*generated), finish_reason=finish_reason)
    return RequestOutput("canary", None, [1], flat(*prompt), [completion], finished=True)


@pytest.mark.parametrize(
    ("vocab_size", "max_model_len", "length"), [(262, 4096, CANARY_PROMPT_TOKENS), (5, 10, 6), (9, 2, 1)]
)
def test_prompts_are_tokens_of_the_model_and_leave_room(vocab_size: int, max_model_len: int, length: int) -> None:
    requests = canary_prompts(vocab_size, max_model_len)
    prompts = [request.prompt_token_ids for request in requests]
    assert [len(prompt) for prompt in prompts] == [length] * 4
    assert all(0 <= token_id < vocab_size for prompt in prompts for token_id in prompt)
    assert requests == canary_prompts(vocab_size, max_model_len)
    assert length == 1 or length + CANARY_TOKENS <= max_model_len


PROMPTS = canary_prompts(262, 100)[:2]


class Engine:
    """Answers with what `answer` makes of the adapter."""

    def __init__(self, answer: Callable[[LoadedAdapter | None], RequestOutput]) -> None:
        self.llm = ScriptedLLM()
        self.llm.may_unload.set()
        llm: Any = self.llm
        self.adapters = Adapters(llm)
        self.answer = answer
        self.swaps = 0
        self.plays = 0
        self.canary = WeightsCanary(self.adapters, self.generate, lambda: self.swaps, lambda: PROMPTS)

    async def generate(self, request: GenerationRequest, adapter: LoadedAdapter | None, salt: str) -> RequestOutput:
        self.plays += 1
        return self.answer(adapter)

    async def load(self, folder: Path) -> LoadedAdapter:
        (folder / "adapter_config.json").write_text('{"r": 2}')
        return await self.adapters.load("7", 7, folder)


@synchronous
async def tried(answer: Callable[[LoadedAdapter | None], RequestOutput]) -> tuple[bool, Engine]:
    engine = Engine(answer)
    folder = adapter_folder("7")
    changes_nothing = await engine.canary.try_adapter(await engine.load(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["7"]
    return changes_nothing, engine


@pytest.mark.parametrize("with_it", [-1.0, -2.0])
def test_an_adapter_passes_and_it_is_told_whether_it_changes_anything(with_it: float) -> None:
    changes_nothing, engine = tried(lambda adapter: output([-3.0], [-1.0 if adapter is None else with_it]))
    assert (changes_nothing, engine.plays, len(engine.llm.calls)) == (with_it == -1.0, 4, 1)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        *((output([-1.0, value], [-3.0]), GenerationNotFinite) for value in (math.nan, math.inf, -math.inf)),
        *((output([-1.0], [-1.0, value]), GenerationNotFinite) for value in (math.nan, math.inf, -math.inf)),
        (output([-1.0], [-3.0], finish_reason="abort"), GenerationLost),
    ],
)
def test_a_canary_that_is_not_finite_or_ends_early_has_failed(answer: RequestOutput, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        tried(lambda adapter: output([-1.0], [-3.0]) if adapter is None else answer)


async def test_full_weights_are_compared_with_those_before() -> None:
    engine = Engine(lambda _: output([-3.0], [-2.0]))
    seen = [await engine.canary.try_current()]
    for logprob in (-2.0, -2.0, -3.0):
        engine.swaps += 1
        engine.answer = lambda _, value=logprob: output([-3.0], [value])  # type: ignore[misc]
        seen.append(await engine.canary.try_current())
    assert engine.plays == 4 * 2
    assert seen == [False, True, True, False]


async def test_weights_after_ones_without_a_canary_are_compared_with_nothing() -> None:
    engine = Engine(lambda _: output([-3.0], [-1.0]))
    await engine.canary.try_current()
    engine.swaps += 2
    assert not await engine.canary.try_current()
