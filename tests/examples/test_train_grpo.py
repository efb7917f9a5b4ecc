"""The training of `make train`: what it trains on, the rollouts that it asks for, its gradients and its reports."""

# mypy: disable-error-code="no-untyped-call"

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import train as starter
from examples import train_grpo
from examples.train_grpo import CLIP, add_gradients, improve, mean_distance, parser, summary, train
from rollout_client import RolloutResponse
from rollout_client.contract.records import MismatchCause, ReportAnswer
from rollout_client.tensors import to_tensors
from tests.clients.message_logs import generated, given_message, rollout
from tests.paths import TINY_MODEL

# Importing what trains takes seconds.
pytestmark = pytest.mark.slow
ROWS, LENGTH, PROMPT = 5, 9, 4


def made_batch() -> SimpleNamespace:
    """Rollouts whose prompts and responses differ in length."""
    made = torch.Generator().manual_seed(0)
    loss_mask = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    prompt_lengths = torch.tensor([PROMPT, PROMPT + 1, PROMPT, PROMPT + 2, PROMPT])
    for row, first in enumerate(prompt_lengths.tolist()):
        loss_mask[row, first : LENGTH - row] = 1
    return SimpleNamespace(
        input_ids=torch.randint(0, 200, (ROWS, LENGTH), generator=made),
        loss_mask=loss_mask,
        prompt_lengths=prompt_lengths,
        generation_logprobs=-5 - torch.rand(ROWS, LENGTH, generator=made),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0]),
    )


@pytest.mark.parametrize("logits_bytes", [1, 2**26])
def test_the_gradients_are_those_of_the_clipped_objective(logits_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_grpo, "LOGITS_BYTES", logits_bytes)
    untyped: Any = AutoModelForCausalLM
    model, batch = untyped.from_pretrained(TINY_MODEL, dtype=torch.float32), made_batch()
    mask = batch.loss_mask[:, 1:].bool()
    logprobs = model(batch.input_ids).logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    ratio = (logprobs - batch.generation_logprobs[:, 1:]).exp()
    advantages = batch.advantages[:, None]
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    (-gains[mask].sum() / mask.sum()).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    computed = add_gradients(model, batch, torch.arange(ROWS), mask.sum())  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)
    torch.testing.assert_close(computed[:, 1:], logprobs.detach() * mask)


@pytest.mark.parametrize("made", [starter.additions, starter.larger_numbers])
def test_no_question_held_out_is_trained_on(made: Any) -> None:
    trained_on, held_out = ({sample["messages"][-1]["content"] for sample in part} for part in made())
    assert not trained_on & held_out
    assert len(trained_on) > 8 * len(held_out) > 700


def file_of(folder: Path, count: int) -> Path:
    path = folder / "samples.jsonl"
    samples = [{"task_name": "t", "messages": [{"role": "user", "content": str(number)}]} for number in range(count)]
    path.write_text("\n\n".join(map(json.dumps, samples)))
    return path


class Service:
    """Stands for the client: every rollout is the same reply, which every second one of a group is rewarded for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, dict[str, int], Any]] = []
        self.reports: list[dict[str, Any]] = []

    def info(self) -> Any:
        return SimpleNamespace(keeps_records=True)

    def rollout(
        self, samples: list[Any], *, num_generations: int, sampling: Any, policy: dict[str, int], keep: Any = None
    ) -> RolloutResponse:
        assert (sampling.temperature, sampling.max_new_tokens) == (1.0, 24)
        self.asked.append((len(samples), num_generations, policy, keep))
        log = [given_message(7, 8, 9), generated(30, 31)]
        ids = [{"idx": idx, "generation_index": n} for idx in range(len(samples)) for n in range(num_generations)]
        rewards = [float(each["generation_index"] % 2) for each in ids]
        played = [
            rollout(*log, **each, reward=reward, rollout_id=str(each)).model_dump()
            for each, reward in zip(ids, rewards, strict=True)
        ]
        fields = {"request_id": "r", "metrics": {"mean_total_reward": 0.5}, "policy": {}, "samples": played}
        return RolloutResponse.model_validate(fields)

    def report_logprobs(self, **columns: Any) -> ReportAnswer:
        self.reports.append(columns)
        cause = MismatchCause(kind="wrong_temperature", message="Divide by it.")
        return ReportAnswer(compared=1, mean_ratio=1.5, largest_ratio=2.0, causes=[cause])


class Pusher:
    """Each push makes the next version."""

    def __init__(self, _client: Any) -> None:
        self.version = 40

    def push(self, _model: Any) -> Any:
        self.version += 1
        return SimpleNamespace(version=self.version)


@pytest.mark.parametrize(
    ("staleness", "demanded"),
    [
        (0, [{"min_version": 41}, {"min_version": 42}]),
        (1, [{"min_version": 41, "max_staleness": 1}, {"min_version": 41, "max_staleness": 1}]),
    ],
)
def test_a_training_demands_versions_measures_reports_and_saves(
    staleness: int, demanded: list[dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_grpo, "PolicyPusher", Pusher)
    recipe = "--steps=2 --prompts-per-step=3 --num-generations=2 --lora-rank=2 --measure-every=2"
    files = [f"--questions={file_of(tmp_path, 10)}", f"--save={tmp_path}/saved"]
    arguments = [str(TINY_MODEL), *files, f"--max-staleness={staleness}"]
    service: Any = Service()
    history = train(parser().parse_args([*arguments, *recipe.split()]), service)
    training = [asked for asked in service.asked if "version" not in asked[2]]
    assert training == [(3, 2, policy, None) for policy in demanded]
    measured = [asked for asked in service.asked if "version" in asked[2]]
    assert measured == [(1, 2, {"version": 41}, None), (1, 2, {"version": 43}, None)]
    trained = {"difference", "ratio", "reward"}
    assert [{*figures} for figures in history] == [{"held_out"}, trained, trained | {"held_out"}]
    assert [report["weight_version"] for report in service.reports] == ["41", "42"]
    assert summary(history) == {
        "held_out_before": 0.5,
        "held_out_after": 0.5,
        "largest_mean_logprob_difference": round(max(history[1]["difference"], history[2]["difference"]), 4),
    }
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"model.safetensors", "tokenizer.json"}
    starter.draw(history, "GRPO", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_first_minibatch_is_computed_with_the_weights_that_sampled() -> None:
    options = parser().parse_args([str(TINY_MODEL), "--questions=-", "--lora-rank=0"])
    model, optimizer, _ = train_grpo.model_to_train(options)
    logs = [[given_message(7, 8, 9), generated(30 + place, 31)] for place in range(4)]
    samples = [rollout(*log, idx=0, reward=float(place), rollout_id=f"r{place}") for place, log in enumerate(logs)]
    batch = to_tensors(samples, pad_token_id=0)
    with torch.no_grad():
        logprobs = model(input_ids=batch.input_ids).logits.log_softmax(-1)
    expected = logprobs[:, 2:4].gather(2, batch.input_ids[:, 3:, None])[..., 0]
    rows, computed = improve(model, optimizer, batch, 2)
    assert len(rows) == 2
    torch.testing.assert_close(computed[:, 3:], expected[rows])
    assert mean_distance(batch, rows, computed) == pytest.approx(float((expected[rows] - -0.5).abs().mean()))
