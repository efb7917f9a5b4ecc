"""One replica among four has one perturbed weight of a real model, and is convicted within 64 rollouts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.reference_model import State
from deployments.rollout_records.comparison import TrainerReport, compared
from deployments.rollout_records.ledger import MismatchLedger
from deployments.rollout_records.trials import Vote, votes
from tests.deployments.rollout_records.reports import LATEST, PROMPT, record_of
from tests.live.forward_pass import model_of, tiny_state

ROLLOUTS, TOKENS = 64, 40
WEIGHTS = [
    "model.norm.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "model.layers.3.input_layernorm.weight",
]


@pytest.fixture(scope="module")
def sampled() -> tuple[torch.Tensor, np.ndarray]:
    """The tokens of rollouts, prompts first, and what a trainer computes in float32."""
    torch.manual_seed(5)
    trainer = model_of(tiny_state())
    prompts = torch.randint(0, trainer.config.vocab_size, (ROLLOUTS, PROMPT))
    with torch.inference_mode():
        ids = trainer.generate(
            prompts, max_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
    return ids, logprobs(tiny_state(), ids, torch.float32)


def logprobs(state: State, ids: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """[rollouts, tokens]: of the generated tokens."""
    with torch.inference_mode():
        of_next = model_of(state).to(dtype)(ids).logits.float().log_softmax(-1)[:, :-1]
    own: np.ndarray = of_next.gather(2, ids[:, 1:, None])[:, PROMPT - 1 :, 0].numpy()
    return own


def with_one_weight_changed(name: str) -> State:
    state = tiny_state()
    changed = state[name].clone()
    changed.view(-1)[7] += 8.0
    return {**state, name: changed}


def convicted(ids: torch.Tensor, trained: np.ndarray, by_replica: dict[str, np.ndarray]) -> Iterator[str]:
    """The replicas that are convicted by scores, of rollouts that the four have made in turn and a ledger suspects."""
    ledger = MismatchLedger(most_mean_ratio=1.1)
    for number in range(ROLLOUTS):
        replica = "abcd"[number % 4]
        record = record_of(f"r{number}", ids[number, PROMPT:].numpy(), by_replica[replica][number], replica)
        report = TrainerReport(f"r{number}", trained[number].astype(float))
        ledger.add(compared(record, report, LATEST)[0], "")
        if (suspicion := ledger.look(0.0)[1]) is None:
            continue
        suspect = suspicion.replica
        for row in [int(one.rollout_id[1:]) for one in suspicion.rollouts]:
            judges = [name for name in by_replica if name != suspect][:2]
            said = votes(*(by_replica[name][row] for name in (suspect, suspect, *judges)))
            if ledger.vote(suspect, Vote(said.item()), 0.0) is not None:
                yield suspect


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_replica_with_one_weight_of_another_value_is_convicted(
    name: str, sampled: tuple[torch.Tensor, np.ndarray]
) -> None:
    ids, trained = sampled
    sound = logprobs(tiny_state(), ids, torch.bfloat16)
    faulty = logprobs(with_one_weight_changed(name), ids, torch.bfloat16)
    assert list(convicted(ids, trained, {"a": sound, "b": sound, "c": faulty, "d": sound})) == ["c"]
    assert list(convicted(ids, trained, dict.fromkeys("abcd", sound))) == []
