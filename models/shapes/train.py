"""Makes the embedded model that sees, from nothing: `python -m models.shapes.train --output models/shapes`.

An Idefics3 small enough to commit, trained for a few minutes on the pictures and questions of the task `shapes`. It is
stopped while it still miscounts, so that reinforcement learning has something to improve. The same seed on the same
machine gives the same weights.
"""

# mypy: disable-error-code="no-untyped-call"

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor

# Not `Idefics3ImageProcessor`, which needs torchvision.
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from deployments.tasks.shapes import COLORS, FORMS, SCENE_ROWS, SEEDS, ShapesInfo
from models.recipes import (
    END,
    NO_LOSS,
    PAD,
    ROLE_TOKENS,
    byte_tokenizer,
    conversation_of,
    generation_config,
    padded,
    save,
    write_model_card,
)
from models.shapes.measure import PICTURES, measured, question_of
from rollout_env import ChatMessage

IMAGE_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
"""Named by Idefics3's processor. A model without `<end_of_utterance>` would get it beyond its vocabulary."""
SPECIAL_TOKENS = [*ROLE_TOKENS, *IMAGE_TOKENS]
AROUND, IMAGE, _, WHOLE = range(END + 1, 256 + len(SPECIAL_TOKENS))
MAX_POSITIONS = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'user' if message['role'] == 'environment' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unknown role: ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""

SIZE, PATCH, PATCHES_OF_A_TOKEN = 64, 8, 2
"""Pixels of a picture's side and of a patch's; patches of a token's side."""
PICTURE_TOKENS = (SIZE // PATCH // PATCHES_OF_A_TOKEN) ** 2
# A token of a picture is then the cell of a scene, so that a layer on top of it can be asked what it sees there.
assert PICTURE_TOKENS == SCENE_ROWS**2

PICTURE = [AROUND, WHOLE, *[IMAGE] * PICTURE_TOKENS, AROUND]

SCENES = 48
"""Conversations of a step."""
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.01
GRADIENT_NORM = 1.0
MOST_STEPS = 3000
ENOUGH = 0.55
"""The mean probability of the right count at which training stops. It rises steeply there."""
STEPS_AVERAGED = 20


class Example(NamedTuple):
    """A conversation: token ids and, aligned with them, the ids to learn, `NO_LOSS` where nothing is learnt."""

    token_ids: list[int]
    labels: list[int]
    pictures: list[bytes]
    cells: list[int]
    """What each cell of a scene shows: 0 for nothing, else the kind of shape from 1 on."""


# --- Tokenizer, processor and model -----------------------------------------------------------------------------------


def make_processor() -> Any:
    """Pictures of any size are scaled to `SIZE`."""
    tokenizer = byte_tokenizer(SPECIAL_TOKENS, end="<|end|>", positions=MAX_POSITIONS, chat_template=CHAT_TEMPLATE)
    edge = {"longest_edge": SIZE}
    pictures = Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    return Idefics3Processor(pictures, tokenizer, image_seq_len=PICTURE_TOKENS, chat_template=CHAT_TEMPLATE)


def make_model() -> Idefics3ForConditionalGeneration:
    """The untrained model; heads of 32, the smallest size that vLLM's attention for processors takes."""
    size: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "initializer_range": 0.06}
    text = {"num_key_value_heads": 3, "head_dim": 32, "num_hidden_layers": 4, "intermediate_size": 192, **size}
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": 256 + len(SPECIAL_TOKENS),
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": False,
            **text,
            **ids,
        },
        vision_config={
            "num_hidden_layers": 2,
            "intermediate_size": 192,
            "image_size": SIZE,
            "patch_size": PATCH,
            **size,
        },
        scale_factor=PATCHES_OF_A_TOKEN,
        image_token_id=IMAGE,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = generation_config(END)
    return model


# --- Data -------------------------------------------------------------------------------------------------------------


def conversation(messages: Sequence[ChatMessage], cells: Sequence[int] = ()) -> Example:
    """Renders as chat template and processor do."""
    pictures = [picture for message in messages for picture in pictures_of(message)]
    shown = conversation_of(messages, (), lambda message: PICTURE * len(pictures_of(message)))
    return Example(*shown, pictures, list(cells))


def pictures_of(message: ChatMessage) -> list[bytes]:
    return [picture for picture in message.get("images", []) if isinstance(picture, bytes)]


def fresh_seed(draw: random.Random) -> int:
    """A seed that no example sample of the environment has."""
    return draw.randrange(SEEDS, 2**63)


def scene_example(draw: random.Random) -> Example:
    info: dict[str, Any] = {"seed": fresh_seed(draw)}
    scene = ShapesInfo(**info).scene
    cells = [0] * SCENE_ROWS**2
    kinds = [(color, form) for color in COLORS for form in FORMS]
    side = SIZE // SCENE_ROWS
    for shape in scene.shapes:
        cells[shape.y // side * SCENE_ROWS + shape.x // side] = 1 + kinds.index((shape.color, shape.form))
    return conversation([question_of(info), {"role": "assistant", "content": str(scene.count)}], cells=cells)


def pixels_of(pictures: Sequence[bytes]) -> torch.Tensor:
    """Pixels as the processor gives them for one row: (1, pictures, 3, side, side), from -1 to 1."""
    read = np.stack([np.asarray(Image.open(BytesIO(picture)).convert("RGB")) for picture in pictures])
    return (torch.from_numpy(read).permute(0, 3, 1, 2).float() / 127.5 - 1)[None]


# --- Training ---------------------------------------------------------------------------------------------------------


class Learnt(NamedTuple):
    """What a model said where it learns, in one row for each token to learn."""

    logits: torch.Tensor
    targets: torch.Tensor
    seen: torch.Tensor
    """The tokens of the pictures, as the language model gets them: (pictures, tokens, hidden size)."""

    def loss(self) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.logits, self.targets)


def learnt(model: Any, examples: Sequence[Example]) -> Learnt:
    token_ids = padded([one.token_ids for one in examples], PAD)
    pictures = [picture for one in examples for picture in one.pictures]
    output = model.model(input_ids=token_ids, pixel_values=pixels_of(pictures))
    targets = padded([one.labels for one in examples], NO_LOSS)[:, 1:]
    here = targets != NO_LOSS
    logits = model.lm_head(output.last_hidden_state[:, :-1][here])
    return Learnt(logits, targets[here], output.image_hidden_states.reshape(len(pictures), PICTURE_TOKENS, -1))


def right_counts(scenes: Learnt) -> float:
    """The mean probability of the right count. Each scene has two tokens to learn: its digit and the end."""
    digits = scenes.logits[::2].softmax(-1)
    return digits.gather(1, scenes.targets[::2, None]).mean().item()


def train(model: Any, seed: int, most_steps: int = MOST_STEPS) -> Iterator[float]:
    """Takes step after step until the model counts right often enough. Yields each step's mean probability."""
    # What a token of a picture shows is learnt at once if it is asked for directly, by a layer that is left out of the
    # model.
    glance = torch.nn.Linear(model.config.text_config.hidden_size, 1 + len(COLORS) * len(FORMS))
    parameters = [*model.parameters(), *glance.parameters()]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    draw = random.Random(seed)
    last: deque[float] = deque(maxlen=STEPS_AVERAGED)
    model.train()
    for _ in range(most_steps):
        shown = [scene_example(draw) for _ in range(SCENES)]
        scenes = learnt(model, shown)
        cells = torch.tensor([one.cells for one in shown])
        glance_loss = torch.nn.functional.cross_entropy(glance(scenes.seen).flatten(0, 1), cells.flatten())
        loss = scenes.loss() + glance_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        last.append(right_counts(scenes))
        yield last[-1]
        if len(last) == STEPS_AVERAGED and sum(last) / len(last) >= ENOUGH:
            return


# --- The model card ---------------------------------------------------------------------------------------------------

MODEL_CARD = """\
---
language: en
library_name: transformers
pipeline_tag: image-text-to-text
tags:
- idefics3
- byte-level
- reinforcement-learning
---

# shapes: the embedded model that sees

An Idefics3 of {parameters:,} parameters, small enough to be committed and to run on two processor cores. It plays the
task `shapes` and gets the counts right about every second time. Outside of that task it says nothing of use.

| | |
| --- | --- |
| Language model | Llama: {config.text_config.num_hidden_layers} layers, hidden size \
{config.text_config.hidden_size}, \
{config.text_config.num_attention_heads} heads of 32, MLP {config.text_config.intermediate_size} |
| Vision tower | {config.vision_config.num_hidden_layers} layers, hidden size {config.vision_config.hidden_size}, \
{config.vision_config.num_attention_heads} heads of 32, MLP {config.vision_config.intermediate_size}; patches of \
{config.vision_config.patch_size} pixels |
| Pictures | scaled to {SIZE} x {SIZE} pixels, not split; {PICTURE_TOKENS} tokens each, and 3 around them |
| Context | {MAX_POSITIONS:,} tokens (trained on one picture) |
| Weights | bfloat16, {megabytes:.1f} MB |
| Tokenizer | byte-level BPE without merges: one token a byte (its id is the byte), 10 special tokens |
| Ends a turn with | `<\\|end\\|>` |

transformers' processor for it is `Idefics3Processor` with `Idefics3ImageProcessorPil`, which needs no torchvision.

## Chat format

    <|user|>
    <image>How many red circles are there? Answer with one digit.<|end|>
    <|assistant|>
    3<|end|>

The content of a message is a text, or a list of parts, of which `{{"type": "image"}}` is rendered as `<image>`. The
processor, or the engine, writes `<fake_token_around_image><global-img>`, {PICTURE_TOKENS} times `<image>` and
`<fake_token_around_image>` in its place. Roles are `system`, `user`, `assistant` and `tool`; `environment` is rendered
as `user`.

## What it can do

Measured on the saved weights by sampling at temperature 1, with seed {seed}, on example samples of the task in its
default difficulty. Training has none of them: their seeds are below 2^31, those that it learns from are above.

| pictures | right | by guessing |
| --- | --- | --- |
| {pictures} | {right:.1%} | 14% |

    python -m models.shapes.measure          # the same; the last line is JSON

It is stopped while it still makes mistakes: reinforcement learning is to have something to improve, and does by
`make train-images`.

## Training

Supervised, from random weights, on pictures and questions as the environment makes them, and the digits that are right.
Learnt are the replies' tokens and, by a layer that is not part of the model, which shape each token of a picture shows.

| | |
| --- | --- |
| Steps | {steps}, each with {SCENES} pictures: until the right count has a mean probability of {ENOUGH:g} over \
{STEPS_AVERAGED} steps |
| Loss | the mean over replies, plus that over the tokens of pictures |
| Optimizer | AdamW, learning rate {LEARNING_RATE:g} after {WARMUP_STEPS} steps of warm-up, betas 0.9 and 0.95, \
weight decay {WEIGHT_DECAY:g}, gradient norm at most {GRADIENT_NORM:g} |
| Precision | float32, saved as bfloat16 |
| Time | {minutes:.1f} minutes on a processor core that had other work, evaluation included \
({processor_minutes:.1f} minutes of processor time) |
| Software | torch {torch_version}, transformers {transformers_version} |

Made by

    python -m models.shapes.train --output models/shapes

The same seed gives the same data everywhere and the same weights on the same machine and software. Elsewhere rounding
differs, and with it the step at which training stops.
"""


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model; its files there are replaced.")],
    most_steps: Annotated[
        int, typer.Option(min=1, help="Training ends after so many steps at the latest.")
    ] = MOST_STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and evaluation.")] = 0,
) -> None:
    """Trains the embedded model that sees, measures it and writes it with its model card."""
    start = time.monotonic()
    # With one thread, sums are the same whatever the number of cores, and nothing waits for a core that is busy.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    processor, model = make_processor(), make_model()
    steps = 0
    with Progress(TextColumn("{task.completed} steps"), TimeElapsedColumn(), TextColumn("{task.description}")) as shown:
        bar = shown.add_task("", total=None)
        for steps, right in enumerate(train(model, seed, most_steps), start=1):
            shown.update(bar, completed=steps, description=f"{right:.0%} of the counts right")
    save(model, processor, output)
    right_share = measured(output, seed)
    write_model_card(
        output, MODEL_CARD, model, start, globals(), seed=seed, steps=steps, pictures=PICTURES, right=right_share
    )
    Console().print(f"{output}: {right_share:.1%} right")


if __name__ == "__main__":
    typer.run(main)
