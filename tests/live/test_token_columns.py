"""Numbers beside the tokens, by a real engine, against a float32 forward pass of transformers.

vLLM returns the experts of tokens from its GPU runner alone: `test_gpu_runner.py` runs this file on it.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reference_model import logprobs_of_next, token_ids_of
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.engine import VLLMEngine
from deployments.protocols.generation import IncludedColumns, SamplingOptions
from rollout_client.contract.messages import Message, PackedNumbers
from rollout_client.contract.rollouts import SampleResult
from rollout_client.contract.sessions import SessionSample
from tests.deployments.generation.serving.vllm_layers import ServedEngine
from tests.live.engines import RunningEngine, float32_settings, running_engine
from tests.live.test_engine import EngineGenerator, played
from tests.model_families import EXPERTS, SIZES, random_model, save_with_tokenizer
from tests.service.scripted import EpisodeRecipe

pytestmark = pytest.mark.long
ON_GPU_RUNNER = os.environ.get("GPU_RUNNER_RIG") == "1"
FAMILY = "qwen3-moe"
TEMPERATURE = 0.7
NEAR = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(random_model(FAMILY, 0), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RunningEngine]:
    with running_engine(float32_settings(folder, 512, enable_return_routed_experts=ON_GPU_RUNNER)) as started:
        yield started


def recipe(folder: Path, sampling: SamplingOptions) -> EpisodeRecipe:
    prompt = [Message(role="user", content="Say", token_ids=[83, 97, 121])]
    return EpisodeRecipe(
        message_log=lambda _: prompt,
        max_new_tokens=40,
        max_rollout_turns=2,
        retries=9,
        tokenizer=TransformersChatTokenizer.load(str(folder)),
        sampling=sampling,
        include=IncludedColumns(
            top_logprobs=3,
            sampling_mask=bool(sampling.top_k),
            entropy=bool(sampling.top_k),
            routed_experts=ON_GPU_RUNNER,
        ),
    )


def numbers(packed: PackedNumbers | None) -> torch.Tensor:
    assert packed is not None
    return torch.from_numpy(np.frombuffer(packed.data, packed.dtype).astype(np.float64).reshape(packed.shape))


def check_numbers(result: SampleResult, logprobs: torch.Tensor) -> int:
    """Holds all numbers against log-probabilities of all tokens after each place; returns how many tokens that were."""
    place = tokens = 0
    for message in result.message_log:
        first, place = place, place + len(message.token_ids)
        if message.generation_logprobs is None:
            continue
        own = logprobs[first - 1 : place - 1].double()
        tokens += len(own)
        ids = torch.tensor(message.token_ids)[:, None]
        said = torch.tensor(message.generation_logprobs).double()
        if message.sampling_mask is not None:
            sizes = numbers(message.sampling_mask_sizes).long()
            allowed = torch.zeros_like(own, dtype=torch.bool)
            allowed[torch.arange(len(own)).repeat_interleave(sizes), numbers(message.sampling_mask).long()] = True
            own = own.masked_fill(~allowed, -torch.inf).log_softmax(-1)
            entropy = -(own.exp() * own.masked_fill(~allowed, 0)).sum(-1)
            torch.testing.assert_close(numbers(message.entropy), entropy, atol=NEAR, rtol=0)
        torch.testing.assert_close(own.gather(1, ids)[:, 0], said, atol=NEAR, rtol=0)
        top = own.topk(3).values
        torch.testing.assert_close(numbers(message.top_logprobs), top, atol=NEAR, rtol=0)
        named = own.gather(1, numbers(message.top_token_ids).long())
        torch.testing.assert_close(named, top, atol=NEAR, rtol=0)
    return tokens


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 5}, {"top_k": 40, "top_p": 0.6}, {"top_k": 30, "min_p": 0.3}], ids=str
)
def test_a_trainer_recomputes_the_logprobs_within_the_sampled_distribution(
    engine: RunningEngine, folder: Path, sampling: dict[str, Any]
) -> None:
    running, loop = engine
    options = SamplingOptions(temperature=TEMPERATURE, ignore_eos=True, seed=1, **sampling)
    for cuts_s in ([], [0.02, 0.03, 0.05]):
        result = loop.run(played(recipe(folder, options), EngineGenerator(running, cuts_s)))
        assert result.error is None
        ids = torch.tensor(token_ids_of(result))
        assert check_numbers(result, logprobs_of_next(random_model(FAMILY, 0), ids, TEMPERATURE)) == 80


def test_experts_of_all_tokens_but_the_last_come_back(engine: RunningEngine, folder: Path) -> None:
    running, loop = engine
    assert running.describe().returns_experts is ON_GPU_RUNNER
    options = SamplingOptions(temperature=TEMPERATURE, ignore_eos=True, seed=1)
    for cuts_s in ([], [0.02, 0.03, 0.05]):
        result = loop.run(played(recipe(folder, options), EngineGenerator(running, cuts_s)))
        log = result.message_log
        if not ON_GPU_RUNNER:
            assert [message.routed_experts for message in log] == [None] * len(log)
            continue
        ids = torch.tensor(token_ids_of(result))
        observation = len(log[-1].token_ids)
        check_experts(result, len(ids) - observation - 1)


def check_experts(result: SampleResult, computed: int) -> None:
    """Holds the experts of so many first tokens against those of the model; the tokens after them have none."""
    log = result.message_log
    ids = torch.tensor(token_ids_of(result))
    rows = torch.cat([numbers(message.routed_experts) for message in log if message.routed_experts is not None])
    assert rows.shape == (computed, SIZES["num_hidden_layers"], EXPERTS["num_experts_per_tok"])
    with torch.inference_mode():
        layers = random_model(FAMILY, 0)(ids[None], output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(EXPERTS["num_experts_per_tok"]).indices for layer in layers], 1)
    assert rows.long().sort(-1).values.tolist() == chosen[: len(rows)].sort(-1).values.tolist()


async def forked_session(engine: VLLMEngine, cuts_s: Sequence[float]) -> list[SessionSample]:
    """Three calls, the later ones of which go on from the first.

    An update of the weights, to the same ones, comes after each of `cuts_s` and interrupts the second call.
    """
    served = ServedEngine(engine)
    sampling: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": 40, "top_p": 0.6, "ignore_eos": True, "seed": 1}
    include = ["top_logprobs:3", "sampling_mask", "entropy", *(["routed_experts"] if ON_GPU_RUNNER else [])]
    await served.open(sampling={**sampling, "max_new_tokens": 40}, include=include)

    async def update() -> None:
        for before_s, cut_s in pairwise([0.0, *cuts_s]):
            await asyncio.sleep(cut_s - before_s)
            engine.weights.aborts += 1
            await engine.llm.abort(list(engine.llm.output_processor.request_states), internal=True)

    question: Any = {"role": "user", "content": "Say"}
    status, first = await served.answer("chat/completions", {"messages": [question]}, "s")
    assert status == 200, first
    log = [question, first["choices"][0]["message"]]
    updating = asyncio.create_task(update())
    await served.events("chat/completions", {"messages": [*log, {"role": "user", "content": "more"}]}, "s")
    await updating
    await served.answer("chat/completions", {"messages": [*log, {"role": "user", "content": "else"}]}, "s")
    served.layers.close()
    return await served.samples()


@pytest.mark.parametrize("cuts_s", [[], [0.02, 0.05, 0.1]])
def test_a_session_has_a_trainers_numbers_over_turns_and_forks(engine: RunningEngine, cuts_s: list[float]) -> None:
    running, loop = engine
    samples = loop.run(forked_session(running, cuts_s))
    assert [len(sample.message_log) for sample in samples] == [4, 4]
    for sample in samples:
        ids = torch.tensor(token_ids_of(sample))
        assert check_numbers(sample, logprobs_of_next(random_model(FAMILY, 0), ids, TEMPERATURE)) == 80
        if ON_GPU_RUNNER:
            check_experts(sample, len(ids) - 1)
