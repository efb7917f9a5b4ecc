"""TRL's own trainers take one step on exported files, as a user would load them."""

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rollout_client import SampleResult
from rollout_client.data_out.export import ExportFormat, export_rollouts
from tests.clients.scripted_service import Json, result
from tests.deployments.images.pictures import picture
from tests.paths import REPOSITORY, TINY_MODEL

with warnings.catch_warnings():
    # What TRL warns of on import.
    warnings.simplefilter("ignore")
    from datasets import Image as ImageFeature
    from datasets import List, load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
    from trl import (  # type: ignore[attr-defined]
        DPOConfig,
        DPOTrainer,
        SFTConfig,
        SFTTrainer,
    )

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


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
    one_step: Json = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "save_strategy": "no"}
    return {"output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, **one_step}


def trained(trainer: Any) -> float:
    """The loss of the step, after which the weights are others."""
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    loss: float = trainer.train().training_loss
    assert any(not torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
    return loss


def test_sft_trains_the_same_tokens_from_texts_and_from_tokens(tokenizer: Any, tmp_path: Path) -> None:
    rollouts = rollouts_of(tokenizer)
    losses, labels = [], []
    formats: tuple[ExportFormat, ...] = ("sft", "tokens")
    for format in formats:
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


def test_pairs_train_a_step_from_the_loss_of_equal_policies(tokenizer: Any, tmp_path: Path) -> None:
    rows = loaded(rollouts_of(tokenizer), "dpo", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    config = DPOConfig(**arguments(tmp_path))
    trainer: Any = DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
    assert trained(trainer) == pytest.approx(math.log(2), abs=1e-3)


SEEING = REPOSITORY / "models" / "shapes"
COLORS = ("red", "green")
QUESTION, ANSWER = "How many?", "1"


def looked(processor: Any, color: str, name: str) -> SampleResult:
    """A rollout about a picture of one color, with the tokens that the model's own processor makes of it."""
    shown = Image.open(BytesIO(picture(color, size=(64, 64))))
    content = [{"type": "image", "image": shown}, {"type": "text", "text": QUESTION}]
    prompt, whole = (
        processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=chat is asked)[
            "input_ids"
        ][0]
        for asked in [[{"role": "user", "content": content}]]
        for chat in (asked, [*asked, {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}])
    )
    tokens = whole[len(prompt) :]
    ranges = [{"media": name, "start": 1, "end": 2}]
    log: list[Json] = [
        {"role": "user", "content": QUESTION, "token_ids": prompt, "mm_ranges": ranges},
        {"role": "assistant", "content": ANSWER, "token_ids": tokens, "generation_logprobs": [-0.5] * len(tokens)},
    ]
    return SampleResult.model_validate(result(COLORS.index(color), message_log=log, total_reward=1.0))


def test_sft_trains_a_model_that_sees_on_the_files_of_its_images(tmp_path: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(SEEING)  # type: ignore[no-untyped-call]
    files = {f"sha256:{place:064}": tmp_path / f"{color}.png" for place, color in enumerate(COLORS)}
    for color, file in zip(COLORS, files.values(), strict=True):
        file.write_bytes(picture(color, size=(64, 64)))
    rollouts = [looked(processor, color, name) for color, name in zip(COLORS, files, strict=True)]
    path = tmp_path / "rows.jsonl"
    export_rollouts(rollouts, "sft", image_file=files.get).save(path)
    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    rows = rows.cast_column("images", List(ImageFeature()))
    model = AutoModelForImageTextToText.from_pretrained(SEEING, dtype=torch.float32)
    config = SFTConfig(**arguments(tmp_path), max_length=None)
    losses = []
    for sample, color in zip(rollouts, COLORS, strict=True):
        prompt, response = (message.token_ids for message in sample.message_log)
        shown = processor.image_processor(
            images=[[Image.open(BytesIO(picture(color, size=(64, 64))))]], return_tensors="pt"
        )
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = model(input_ids=ids, pixel_values=shown["pixel_values"]).logits.log_softmax(-1)[0]
        losses += [-logprobs[len(prompt) - 1 + place, token] for place, token in enumerate(response)]
    trainer: Any = SFTTrainer(model, args=config, train_dataset=rows, processing_class=processor)
    assert trained(trainer) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-4)
