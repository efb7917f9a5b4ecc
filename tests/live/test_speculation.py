"""Drafted tokens: what an engine samples with them has the model's distribution, and a seed repeats it."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.reference_model import logprobs_of_next, model_of
from deployments.policy.commands import SwapOptions
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from tests.live.engines import NGRAM, RunningEngine, float32_settings, running_engine
from tests.live.forward_pass import perturbed, tiny_state
from tests.paths import TINY_MODEL

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PROMPT = tuple(b"17 + 25 = 42. 17 + 25 = 43. 17 + 25 = 4")
TOKENS, SAMPLES, PAIRS = 12, 3000, 5
ROUNDING = 2e-4
METHODS = ("ngram", "draft_model", "custom_class")
SAMPLINGS = [
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.7, top_p=0.9),
    SamplingOptions(temperature=0.7, top_k=5),
    SamplingOptions(temperature=1.3, top_k=20, top_p=0.95),
    SamplingOptions(temperature=0.0),
]


class NextTokens:
    """Drafts the same tokens for all, which the model would sample sometimes."""

    def __init__(self, *_arguments: Any) -> None: ...

    def load_model(self, *_arguments: Any) -> None: ...

    def propose(self, sampled: list[list[int]], *_arguments: Any, **_options: Any) -> list[list[int]]:
        return [list(b"2. ") if tokens else [] for tokens in sampled]


@pytest.fixture(scope="module", params=METHODS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with drafting_engine(request.param, tmp_path_factory.mktemp("draft")) as running:
        yield running


@contextmanager
def drafting_engine(method: str, folder: Path) -> Iterator[RunningEngine]:
    """Its model for drafts, of `draft_model`, has other weights than the model."""
    shutil.copytree(TINY_MODEL, folder, dirs_exist_ok=True)
    save_file(perturbed(1), folder / "model.safetensors")
    of_method: dict[str, dict[str, Any]] = {
        "ngram": NGRAM,
        "draft_model": {"model": str(folder)},
        "custom_class": {"model": f"{__name__}.NextTokens"},
    }
    drafts = {**of_method[method], "method": method, "num_speculative_tokens": 3}
    settings = float32_settings(TINY_MODEL, 256, speculative_config=drafts, enable_chunked_prefill=False)
    with running_engine(settings, max_num_seqs=128) as running:
        yield running


def generated(running: RunningEngine, sampling: SamplingOptions, count: int, tokens: int = TOKENS) -> list[Generation]:
    engine, loop = running

    async def all_of_them() -> list[Generation]:
        seeded = [replace(sampling, seed=seed, ignore_eos=True) for seed in range(count)]
        asked = [GenerationRequest(f"{at}", PROMPT, tokens, (), each) for at, each in enumerate(seeded)]
        return await asyncio.gather(*map(engine.generate, asked))

    return loop.run(all_of_them())


def expected(ids: tuple[int, ...], sampling: SamplingOptions, model: Any) -> torch.Tensor:
    """[len(ids), vocabulary]: log-probabilities of the distribution of the token that follows at each place."""
    logprobs = logprobs_of_next(model, ids, sampling.temperature or 1.0).clone()
    if sampling.top_k:
        logprobs[logprobs < logprobs.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        logprobs = logprobs.log_softmax(-1)
    sorted_logprobs, order = logprobs.sort(descending=True)
    before = sorted_logprobs.exp().cumsum(-1) - sorted_logprobs.exp()
    outside = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
    return logprobs.masked_fill(outside & (sampling.top_p < 1), -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probabilities_are_those_of_a_forward_pass(engine: RunningEngine, sampling: SamplingOptions) -> None:
    model = model_of(TINY_MODEL, dtype=torch.float32)
    for generation in generated(engine, sampling, 48):
        of_next = expected(PROMPT + tuple(generation.token_ids), sampling, model)[len(PROMPT) - 1 : -1]
        own = of_next.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        assert len(generation.token_ids) == TOKENS
        if sampling.temperature:
            assert (own - torch.tensor(generation.logprobs)).abs().max() <= ROUNDING
        else:
            assert (of_next.max(-1).values - own).max() <= ROUNDING


def test_sampled_tokens_have_the_distribution_of_the_model(engine: RunningEngine) -> None:
    """By a chi-square test of the first pairs of tokens; those expected fewer than `PAIRS` times are one cell."""
    model, sampling = model_of(TINY_MODEL, dtype=torch.float32), SamplingOptions(temperature=1.0)
    counted = Counter(tuple(generation.token_ids[:2]) for generation in generated(engine, sampling, SAMPLES, 3))
    firsts = expected(PROMPT, sampling, model)[-1].exp() * SAMPLES
    likely = {
        (first, second): float(count)
        for first in (firsts >= PAIRS).nonzero()[:, 0].tolist()
        for second, count in enumerate(firsts[first] * expected((*PROMPT, first), sampling, model)[-1].exp())
        if count >= PAIRS
    }
    cells = [(counted[pair], count) for pair, count in likely.items()]
    cells.append((SAMPLES - sum(counted[pair] for pair in likely), SAMPLES - sum(likely.values())))
    distance = sum((found - count) ** 2 / count for found, count in cells)
    assert len(cells) > 8
    assert torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(distance / 2)) > 1e-3


def test_equal_seeds_give_equal_tokens_in_whatever_company(engine: RunningEngine) -> None:
    sampling = SamplingOptions(temperature=1.0)
    many, few = generated(engine, sampling, 96), generated(engine, sampling, 7)
    assert [list(one.token_ids) for one in many[:7]] == [list(one.token_ids) for one in few]


def test_a_push_brings_the_weights_of_the_model_that_drafts(tmp_path: Path) -> None:
    greedy = SamplingOptions(temperature=0.0)
    with drafting_engine("draft_model", tmp_path / "draft") as running:
        engine, loop = running

        def steps_and_tokens() -> tuple[int, list[int]]:
            before = vars(engine)["_steps"].taken
            (generation,) = generated(running, greedy, 1, 60)
            return vars(engine)["_steps"].taken - before, list(generation.token_ids)

        async def push() -> None:
            await engine.weights.stage(1, tmp_path / "pushed.safetensors")
            await engine.weights.swap(SwapOptions())

        stale, tokens = steps_and_tokens()
        drafts = {f"draft.{name}": tensor.clone() for name, tensor in tiny_state().items()}
        save_file(tiny_state() | drafts, tmp_path / "pushed.safetensors")
        loop.run(push())
        fresh, unchanged = steps_and_tokens()
    assert unchanged == tokens
    # Four tokens a step; the last step of another generation may be counted late.
    assert fresh in (16, 17)
    assert stale > 25
