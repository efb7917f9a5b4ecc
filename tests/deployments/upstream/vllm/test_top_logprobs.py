"""The most probable tokens of a call beside the score of a whole context."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import sampler
from vllm.v1.sample.sampler import Sampler

from deployments.upstream.vllm.plugin import _keep_top_logprobs_beside_scores

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def test_a_call_beside_a_score_has_its_most_probable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's own compiles for seconds; nothing here depends on it.
    monkeypatch.setattr(sampler, "batched_count_greater_than", lambda logprobs, _sampled: torch.zeros(len(logprobs)))
    originals = ("forward", "gather_specific_token_logprobs")
    vllms: Any = type("Fresh", (Sampler,), {name: inspect.unwrap(getattr(Sampler, name)) for name in originals})
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    logprobs = logits.log_softmax(dim=-1)

    def tensors(named: dict[int, list[int]], most: int | None) -> LogprobsTensors:
        metadata = SimpleNamespace(
            max_num_logprobs=most,
            logprob_token_ids=named,
            temperature=None,
            all_greedy=True,
            all_random=False,
            no_penalties=True,
            bad_words_token_ids={},
            allowed_token_ids_mask=None,
            logitsprocs=SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[]),
            thinking_budget_state_holder=None,
            output_token_ids=[],
            spec_token_ids=[],
        )
        # As vLLM's model runner calls it.
        sampled = vllms("processed_logprobs")(logits=logits.clone(), sampling_metadata=metadata)
        found: LogprobsTensors = sampled.logprobs_tensors
        return found

    assert tensors({1: [0]}, most=2).logprob_token_ids.tolist() == [[1, 0], [3, 0]], "vLLM does so by itself"
    for _ in range(2):
        _keep_top_logprobs_beside_scores(vllms)
    beside = tensors({1: [0]}, most=2)
    assert beside.logprob_token_ids.tolist() == [[1, 1, 2], [3, 0, 0]]
    expected = [[logprobs[0, 1], logprobs[0, 1], logprobs[0, 2]], [logprobs[1, 3], logprobs[1, 0], -torch.inf]]
    assert torch.equal(beside.logprobs, torch.tensor(expected))
    assert tensors({1: [0, 2, 3]}, most=1).logprob_token_ids.tolist() == [[1, 1, 0, 0], [3, 0, 2, 3]]
    assert tensors({1: [0]}, most=0).logprob_token_ids.tolist() == [[1, 0], [3, 0]]
    assert tensors({}, most=1).logprob_token_ids.tolist() == [[1, 1], [3, 3]]
