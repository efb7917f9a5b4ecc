"""Measures the model on pictures that it was never trained on: `python -m models.shapes.measure`.

Samples the first reply to example samples of the task `shapes` at temperature 1 with transformers, by the processor and
the chat template that lie beside the weights. The last line is JSON.
"""

# mypy: disable-error-code="no-untyped-call"

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from PIL import Image
from rich.console import Console
from transformers import GenerationConfig, Idefics3ForConditionalGeneration, Idefics3Processor

from deployments.tasks.shapes import Kind, ShapesEnvironment, ShapesInfo
from rollout_env import ChatMessage

PICTURES: dict[Kind, int] = {"count": 500, "maze": 200}
GUESSED: dict[Kind, float] = {"count": 1 / 7, "maze": 1 / 4}
LONGEST_REPLY = 16


class Accuracy(NamedTuple):
    """How often the first reply is right."""

    kind: Kind
    pictures: int
    right: float
    guessed: float
    """The share that a random digit or move of those that occur would get right."""


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
    """Whether the reply is the digit, or a move on the shortest way to the exit."""
    state = ShapesInfo(**info)
    if state.kind == "maze":
        return reply == state.maze.shortest_way(state.maze.start)[0]
    return ShapesEnvironment().step([{"role": "assistant", "content": reply}], state).reward == 1.0


def measured(folder: Path, seed: int) -> list[Accuracy]:
    """The accuracy by kind of the weights in a folder."""
    torch.manual_seed(seed)
    processor: Any = Idefics3Processor.from_pretrained(folder)
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for kind, count in PICTURES.items():
        infos = [sample["extra_env_info"] for sample in ShapesEnvironment([kind]).example_samples(count, seed)]
        said = replies(model, processor, [question_of(info) for info in infos])
        right = sum(is_right(info, reply) for info, reply in zip(infos, said, strict=True))
        rows.append(Accuracy(kind, count, right / count, GUESSED[kind]))
    return rows


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path(__file__).parent,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples, and of the replies.")] = 0,
) -> None:
    """Prints how often the model is right at first, by kind."""
    rows = measured(folder, seed)
    for row in rows:
        Console(stderr=True).print(f"{row.kind}: {row.right:.1%} of {row.pictures} right")
    typer.echo(json.dumps({row.kind: row.right for row in rows}))


if __name__ == "__main__":
    typer.run(main)
