"""The training of `make train`: what it trains on and measures with, and its gradients."""

# mypy: disable-error-code="no-untyped-call"

import json
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoProcessor

from deployments.tasks.shapes import _scene, _scene_picture
from examples import train_grpo
from examples.train_grpo import (
    CLIP,
    EMBEDDED,
    QUESTIONS,
    SEEING,
    SMALL,
    Curve,
    add_gradients,
    additions,
    config_of_model,
    from_file,
    generated_tokens,
    images_of,
    improve,
    mean_distance,
    mean_reward,
    model_and_recipe,
    model_to_train,
    report_step,
    says_an_image,
    sum_of,
    wants_reports,
)
from models.tiny.train import addition_pairs
from rollout_client import RolloutResponse
from rollout_client.contract.records import MismatchCause, ReportAnswer
from rollout_client.tensors import to_tensors
from service.startup.generated_config import EMBEDDED_MODEL, EMBEDDED_MODEL_THAT_SEES
from tests.clients.message_logs import generated, given_message, rollout
from tests.paths import REPOSITORY, TINY_MODEL

# Importing what trains takes seconds.
pytestmark = pytest.mark.slow
ROWS, LENGTH, PROMPT = 5, 9, 4


def question_of(sample: Any) -> str:
    return str((sample.messages or [sample])[-1])


def test_the_sums_held_out_are_those_that_the_embedded_model_has_not_seen() -> None:
    _, unseen = addition_pairs(0)
    assert additions().held_out == [sum_of(*pair) for pair in unseen]


def test_each_embedded_model_has_its_recipe_and_questions_about_pictures_have_their_model() -> None:
    assert model_and_recipe(None, None) == (str(EMBEDDED_MODEL), EMBEDDED)
    assert model_and_recipe(None, "shapes") == (str(EMBEDDED_MODEL_THAT_SEES), SEEING)
    assert model_and_recipe(str(REPOSITORY / "models" / "shapes"), None)[1] == SEEING
    assert model_and_recipe(str(TINY_MODEL), "larger")[1] == EMBEDDED
    assert model_and_recipe("org/model", "shapes") == ("org/model", SMALL)


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_question_held_out_is_trained_on(name: str) -> None:
    questions = QUESTIONS[name]()
    assert not {*map(question_of, questions.trained_on)} & {*map(question_of, questions.held_out)}
    assert len(questions.trained_on) > 5 * len(questions.held_out) > 400


def test_each_tenth_sample_of_a_file_is_held_out(tmp_path: Path) -> None:
    samples = [{"task_name": "t", "messages": [{"role": "user", "content": str(number)}]} for number in range(21)]
    (tmp_path / "samples.jsonl").write_text("\n\n".join(map(json.dumps, samples)))
    read = from_file(str(tmp_path / "samples.jsonl"))()
    trained_on, held_out = ([str(sample.messages and sample.messages[-1].content) for sample in part] for part in read)
    assert held_out == ["0", "10", "20"]
    assert trained_on == [str(n) for n in range(21) if n % 10]


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
def test_the_gradients_are_those_of_the_clipped_objective_over_the_whole_batch(
    logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    distances = (logprobs - batch.generation_logprobs[:, 1:])[mask].abs()
    difference = mean_distance(batch, torch.arange(ROWS), computed)  # type: ignore[arg-type]
    assert difference == pytest.approx(float(distances.mean()))


def pictured(model: Any, numbers: list[int]) -> tuple[Any, RolloutResponse, dict[str, bytes]]:
    """Rollouts that each show one picture of these, as a tensor and as the service answers."""
    processor = AutoProcessor.from_pretrained(EMBEDDED_MODEL_THAT_SEES)
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pictures = {f"sha256:{number:064x}": _scene_picture(_scene(number, 64, 6, 6), 64) for number in numbers}
    token_ids = processor(text=text, images=[Image.new("RGB", (64, 64))])["input_ids"][0]
    first, last = token_ids.index(model.config.image_token_id), len(token_ids)
    shown = [{"media": name, "start": first, "end": first + 16} for name in pictures]
    said = {"role": "assistant", "content": "3", "token_ids": [51, 261], "generation_logprobs": [-1.0, -0.1]}
    log = {"role": "user", "content": "How many?", "token_ids": token_ids}
    samples = [
        rollout(log | {"mm_ranges": [each]}, said | {"reward": float(place)}, idx=0, total_reward=float(place))
        for place, each in enumerate(shown)
    ]
    response = response_of(0, samples=samples)
    batch = to_tensors(response, pad_token_id=0)
    assert int(batch.prompt_lengths[0]) == last
    return batch, response, pictures


def test_each_row_is_given_the_picture_of_its_rollout() -> None:
    model, *_ = model_to_train(str(EMBEDDED_MODEL_THAT_SEES), SEEING, seed=0)
    batch, response, pictures = pictured(model, [1, 2, 3])
    client: Any = SimpleNamespace(image=pictures.pop)
    images = images_of(client, response, batch, AutoProcessor.from_pretrained(EMBEDDED_MODEL_THAT_SEES))
    assert pictures == {}
    rows = torch.arange(3)
    together = model(input_ids=batch.input_ids, **images(rows)).logits
    for order in ([2], [1, 0]):
        apart = model(input_ids=batch.input_ids[order], **images(torch.tensor(order))).logits
        torch.testing.assert_close(apart, together[order])
    assert not torch.allclose(together[0, -1], together[1, -1])
    difference = mean_distance(batch, rows, add_gradients(model, batch, rows, batch.loss_mask.sum(), images))
    logprobs = together.log_softmax(-1)[:, -3:-1].gather(2, batch.input_ids[:, -2:, None])[..., 0]
    assert difference == pytest.approx(float((logprobs - torch.tensor([-1.0, -0.1])).abs().mean()), abs=1e-5)


def test_a_rollout_whose_policy_has_sampled_a_placeholder_itself_is_left_out() -> None:
    model, optimizer, _ = model_to_train(str(EMBEDDED_MODEL_THAT_SEES), SEEING, seed=0)
    batch, response, pictures = pictured(model, [1, 2, 3])
    images = images_of(
        SimpleNamespace(image=pictures.get),  # type: ignore[arg-type]
        response,
        batch,
        AutoProcessor.from_pretrained(EMBEDDED_MODEL_THAT_SEES),
    )
    batch.input_ids[2, -2] = model.config.image_token_id
    assert says_an_image(model, batch).tolist() == [False, False, True]
    seen: set[int] = set()

    def noted(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.update(rows.tolist())
        return images(rows)

    improve(model, optimizer, batch, 1, noted)
    assert seen == {0}


class ReportingClient:
    """Answers reports with one cause, and keeps them."""

    def __init__(self, keeps_records: bool = True) -> None:
        self.keeps_records = keeps_records
        self.reports: list[dict[str, Any]] = []

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(keeps_records=self.keeps_records)

    def report_logprobs(self, **columns: Any) -> ReportAnswer:
        self.reports.append(columns)
        cause = MismatchCause(kind="wrong_temperature", message="Divide by it.")
        return ReportAnswer(compared=1, mean_ratio=1.5, largest_ratio=2.0, causes=[cause])


def test_the_first_minibatch_of_a_step_is_reported_with_the_version_that_has_sampled() -> None:
    model, optimizer, _ = model_to_train(str(TINY_MODEL), EMBEDDED, seed=0)
    logs = [[given_message(7, 8, 9), generated(30 + place, 31)] for place in range(4)]
    samples = [
        rollout(*log, idx=0, total_reward=float(place), rollout_id=f"r{place}") for place, log in enumerate(logs)
    ]
    batch = to_tensors(samples, pad_token_id=0)
    with torch.no_grad():
        logprobs = model(input_ids=batch.input_ids).logits.log_softmax(-1)
    expected = logprobs[:, 2:4].gather(2, batch.input_ids[:, 3:, None])[..., 0]
    client, curve = ReportingClient(), Curve("")
    untyped: Any = client
    printed = StringIO()
    for step in (1, 2):
        report = partial(report_step, untyped, 40 + step, step, curve, Console(file=printed))
        improve(model, optimizer, batch, 2, report=report)
    assert [report["weight_version"] for report in client.reports] == ["41", "42"]
    first = client.reports[0]
    assert len(first["rollouts"]) == 2
    for place, name in enumerate(first["rollouts"]):
        row = int(name[1:])
        assert first["token_ids"][place].tolist() == [7, 8, 9, 30 + row, 31]
        assert first["masks"][place].tolist() == [0, 0, 0, 1, 1]
        torch.testing.assert_close(first["logprobs"][place][3:], expected[row])
    assert curve.ratio == {1: 1.5, 2: 1.5}
    assert "ratio 1.5000" in curve.latest
    assert printed.getvalue().count("Warning, wrong_temperature: Divide by it.") == 1


@pytest.mark.parametrize(
    ("asked", "keeps_records", "reports"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_steps_are_reported_where_the_service_keeps_records_or_as_asked(
    asked: bool | None, keeps_records: bool, reports: bool
) -> None:
    client: Any = ReportingClient(keeps_records)
    assert wants_reports(client, asked) is reports


def test_a_service_of_its_own_keeps_records() -> None:
    [application] = config_of_model(str(TINY_MODEL), 0).applications
    assert application.args["rollout_records"] == {}


def test_a_batch_in_which_all_groups_agree_is_not_reported() -> None:
    model, optimizer, _ = model_to_train(str(TINY_MODEL), EMBEDDED, seed=0)
    batch = to_tensors([rollout(given_message(7), generated(30), rollout_id="r")] * 2, pad_token_id=0)
    reports: list[Any] = []
    assert improve(model, optimizer, batch, 2, report=reports.append) == 0
    assert reports == []


def test_an_adapter_is_all_that_is_trained_where_its_rank_is_given() -> None:
    model, *_ = model_to_train(str(TINY_MODEL), EMBEDDED._replace(lora_rank=4), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def response_of(tokens: int, **fields: Any) -> RolloutResponse:
    metrics = {"total_generated_tokens": tokens, "mean_total_reward": 0.25}
    return RolloutResponse.model_validate({"request_id": "r", "metrics": metrics, "policy": {}, "samples": []} | fields)


def test_tokens_of_dropped_groups_and_of_those_begun_ahead_are_counted() -> None:
    assert generated_tokens(response_of(300)) == 300
    selected = response_of(300, groups={"drawn": 3, "kept": 1, "dropped": {"reward_std.gt": 2}, "ahead": 1})
    assert generated_tokens(selected) == 400
    assert mean_reward(selected) == 0.25
