"""TRL's own trainers take one step on exported files, as a user would load them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_client import SampleResult
from rollout_client.data_out.export import ExportFormat, export_rollouts
from tests.clients.scripted_service import Json, result
from tests.paths import TINY_MODEL

with warnings.catch_warnings():
    # What TRL warns of on import.
    warnings.simplefilter("ignore")
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import (  # type: ignore[attr-defined]
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        SFTConfig,
        SFTTrainer,
    )

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def rollouts_of(tokenizer: Any) -> list[SampleResult]:
    """Two groups of two rollouts, with the tokens that the model's own template gives them."""
    return [played(tokenizer, place, generation) for place in range(2) for generation in range(2)]


def played(tokenizer: Any, place: int, generation: int) -> SampleResult:
    chat: list[Json] = [{"role": "user", "content": f"What is 1 + {place}?"}]
    answer = f"\\boxed{{{1 + place + generation}}}"
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}], return_dict=False)
    tokens = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    logprobs = [-0.5] * len(tokens)
    response: Json = {"role": "assistant", "content": answer, "token_ids": tokens, "generation_logprobs": logprobs}
    log = [{**chat[0], "token_ids": prompt}, response]
    return SampleResult.model_validate(result(place, generation, message_log=log, total_reward=1.0 - generation))


def loaded(rollouts: list[SampleResult], format: ExportFormat, folder: Path) -> Any:
    path = folder / f"{format}.jsonl"
    export_rollouts(rollouts, format).save(path)
    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def arguments(folder: Path) -> Json:
    """One step on everything."""
    return {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }


def trained(trainer: Any) -> float:
    """The loss of the step, after which the weights are others."""
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    loss: float = trainer.train().training_loss
    assert any(not torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
    return loss


def test_sft_trains_the_same_tokens_from_texts_and_from_tokens(tokenizer: Any, tmp_path: Path) -> None:
    rollouts = rollouts_of(tokenizer)
    losses, labels = [], []
    for format in ("sft", "trl"):
        rows = loaded(rollouts, format, tmp_path)
        model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
        trainer: Any = SFTTrainer(
            model, args=SFTConfig(**arguments(tmp_path)), train_dataset=rows, processing_class=tokenizer
        )
        labels.append(sorted(trainer.train_dataset["labels"]))
        losses.append(trained(trainer))
    expected = [[-100] * len(sample.message_log[0].token_ids) + sample.message_log[1].token_ids for sample in rollouts]
    assert labels == [sorted(expected)] * 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


PREFERENCES: list[tuple[ExportFormat, Callable[..., Any], Callable[..., Any], float]] = [
    ("dpo", DPOTrainer, DPOConfig, 0.6931),
    ("kto", KTOTrainer, KTOConfig, 0.5),
]
"""With the loss of a policy that is its own reference: ln 2, and one half."""


@pytest.mark.parametrize(("format", "trainer", "config", "loss"), PREFERENCES)
def test_preferences_train_a_step(
    format: ExportFormat, trainer: Any, config: Any, loss: float, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    rows = loaded(rollouts_of(tokenizer), format, tmp_path)
    made = trainer(model, args=config(**arguments(tmp_path)), train_dataset=rows, processing_class=tokenizer)
    assert trained(made) == pytest.approx(loss, abs=1e-3)
