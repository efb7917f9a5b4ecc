"""Measures the model on pictures that it was never trained on: `python -m models.shapes.measure`.

Samples a reply to example samples of the task `shapes` at temperature 1 with transformers, by the processor and
the chat template that lie beside the weights. The last line is JSON.
"""

# mypy: disable-error-code="no-untyped-call"

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from rich.console import Console
from transformers import GenerationConfig, Idefics3ForConditionalGeneration, Idefics3Processor

from deployments.tasks.shapes import ShapesEnvironment, ShapesInfo
from rollout_env import ChatMessage

PICTURES = 500
LONGEST_REPLY = 16


def question_of(info: dict[str, Any]) -> ChatMessage:
    """The message with which the environment begins."""
    started = ShapesEnvironment().start([], ShapesInfo(**info)).observation
    assert isinstance(started, dict)
    return started


@torch.inference_mode()
def replies(model: Any, processor: Any, messages: Sequence[ChatMessage]) -> list[str]:
    """What the model says to messages that show one picture each."""
    end, pad = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=pad)
    settings.max_new_tokens = LONGEST_REPLY
    said = []
    for message in messages:
        [picture] = message["images"]
        assert isinstance(picture, bytes)
        parts = [{"type": "image"}, {"type": "text", "text": message["content"]}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        given = processor(text=text, images=[Image.open(BytesIO(picture))], return_tensors="pt")
        ids = model.generate(**given.to(model.dtype), generation_config=settings)[0, given["input_ids"].shape[1] :]
        said.append(str(processor.tokenizer.decode(ids, skip_special_tokens=True)))
    return said


def is_right(info: dict[str, Any], reply: str) -> bool:
    """Whether the reply is the digit."""
    return ShapesEnvironment().step([{"role": "assistant", "content": reply}], ShapesInfo(**info)).reward == 1.0


def measured(folder: Path, seed: int) -> float:
    """The share of counts that the weights in a folder get right."""
    torch.manual_seed(seed)
    processor: Any = Idefics3Processor.from_pretrained(folder)
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    infos = [sample["extra_env_info"] for sample in ShapesEnvironment().example_samples(PICTURES, seed)]
    said = replies(model, processor, [question_of(info) for info in infos])
    return sum(map(is_right, infos, said)) / PICTURES


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path(__file__).parent,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples, and of the replies.")] = 0,
) -> None:
    """Prints how often the model counts right."""
    right = measured(folder, seed)
    Console(stderr=True).print(f"{right:.1%} of {PICTURES} right")
    typer.echo(json.dumps({"count": right}))


if __name__ == "__main__":
    typer.run(main)
