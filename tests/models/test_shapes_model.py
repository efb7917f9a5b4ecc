"""The embedded model that sees: its chat format, its training, and how often its committed weights are right."""

# mypy: disable-error-code="no-untyped-call"

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Idefics3ForConditionalGeneration, Idefics3Processor

from deployments.tasks.shapes import SEEDS, ShapesEnvironment
from models.recipes import NO_LOSS
from models.shapes.measure import is_right, question_of, replies
from models.shapes.train import (
    CHAT_TEMPLATE,
    PICTURE_TOKENS,
    Example,
    conversation,
    fresh_seed,
    learnt,
    make_model,
    make_processor,
    pixels_of,
    right_counts,
    scene_example,
    train,
)
from rollout_env import ChatMessage
from tests.paths import REPOSITORY

MODEL = REPOSITORY / "models" / "shapes"
TEXTS = [
    {"role": "system", "content": "Look."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "3"},
    {"role": "environment", "content": "Wrong.\n"},
    {"role": "tool", "content": ""},
]

pytestmark = pytest.mark.slow


def question(seed: int = 1) -> ChatMessage:
    return question_of({"seed": seed})


def in_parts(message: ChatMessage) -> dict[str, Any]:
    images = [{"type": "image"}] * len(message.get("images", []))
    return {"role": message["role"], "content": [*images, {"type": "text", "text": message["content"]}]}


def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_texts_are_rendered_as_the_embedded_model_tiny_does() -> None:
    tokenizers = [AutoTokenizer.from_pretrained(MODEL.parent / name) for name in ("shapes", "tiny")]
    assert rendered(tokenizers[0], TEXTS) == rendered(tokenizers[1], TEXTS)
    as_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in TEXTS]
    assert rendered(tokenizers[0], as_parts) == rendered(tokenizers[0], TEXTS)
    with pytest.raises(Exception, match="Unknown role: judge"):
        rendered(tokenizers[0], [{"role": "judge", "content": ""}])


def test_an_image_is_rendered_where_it_stands_among_the_parts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    text = rendered(tokenizer, [{"role": "user", "content": parts}])
    assert text == "<|user|>\na<image>b<image><|end|>\n<|assistant|>\n"
    assert tokenizer.convert_tokens_to_ids(["<|end|>", "<image>"]) == [261, 263]


def test_the_processor_gives_the_ids_and_pixels_of_the_training() -> None:
    messages: list[ChatMessage] = [question(), {"role": "assistant", "content": "3"}, question(2)]
    shown = conversation(messages)
    for processor in (make_processor(), Idefics3Processor.from_pretrained(MODEL)):
        text = processor.apply_chat_template([in_parts(message) for message in messages])
        images = [Image.open(BytesIO(picture)) for picture in shown.pictures]
        given = processor(text=text, images=images, return_tensors="pt")
        assert given["input_ids"][0].tolist() == shown.token_ids
        torch.testing.assert_close(given["pixel_values"], pixels_of(shown.pictures), rtol=0, atol=1e-6)
        assert given["pixel_attention_mask"].all()


@pytest.mark.parametrize("size", [(64, 64), (200, 200), (30, 120), (1, 1)])
def test_a_picture_of_any_size_has_as_many_tokens(size: tuple[int, int]) -> None:
    processor: Any = Idefics3Processor.from_pretrained(MODEL)
    given = processor(text="<image>", images=[Image.new("RGB", size)], return_tensors="pt")
    assert given["input_ids"][0].tolist() == [262, 265, *[263] * PICTURE_TOKENS, 262]
    assert given["pixel_values"].shape == (1, 1, 3, 64, 64)


def test_what_is_learnt_are_the_replies_and_their_ends() -> None:
    user: ChatMessage = {"role": "user", "content": "?"}
    replies: list[ChatMessage] = [{"role": "assistant", "content": reply} for reply in ("up", "left")]
    shown = conversation([user, replies[0], user, replies[1]])
    asked, said = [258, 10, ord("?"), 261, 10], [259, 10, *b"left", 261, 10]
    assert shown.token_ids == [*asked, 259, 10, *b"up", 261, 10, *asked, *said]
    first = [*[NO_LOSS] * 7, *b"up", 261, NO_LOSS]
    assert shown.labels == [*first, *[NO_LOSS] * 7, *b"left", 261, NO_LOSS]


def replies_of(shown: Example) -> list[str]:
    """The replies that are learnt."""
    said = bytes(label if label < 256 else 0 for label in shown.labels if label != NO_LOSS).decode()
    return said.split("\0")[:-1]


def test_scenes_are_answered_right(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def noted(info: dict[str, Any]) -> ChatMessage:
        asked.append(info)
        return question_of(info)

    monkeypatch.setattr("models.shapes.train.question_of", noted)
    draw = random.Random(0)
    shown = [scene_example(draw) for _ in range(50)]
    for info, one in zip(asked, shown, strict=True):
        [reply] = replies_of(one)
        assert is_right(info, reply)
        assert len(one.pictures) == 1
        assert any(one.cells.count(kind) == int(reply) for kind in range(1, 13))


def test_no_picture_to_learn_from_is_of_an_example_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def noted(draw: random.Random) -> int:
        seeds.append(fresh_seed(draw))
        return seeds[-1]

    monkeypatch.setattr("models.shapes.train.fresh_seed", noted)
    draw = random.Random(0)
    for _ in range(2):
        scene_example(draw)
    assert len(seeds) == 2
    assert min(seeds) >= SEEDS
    assert max(sample["extra_env_info"]["seed"] for sample in ShapesEnvironment().example_samples(1000, 0)) < SEEDS


def test_training_lowers_the_loss_and_equal_seeds_give_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.shapes.train.SCENES", 4)
    draw = random.Random(1)
    held_out = [scene_example(draw) for _ in range(8)]
    runs: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(1)
        model = make_model()
        before = learnt(model, held_out).loss().item()
        assert len(list(train(model, seed=0, most_steps=8))) == 8
        assert learnt(model, held_out).loss().item() < before - 0.5
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_training_stops_once_enough_counts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENOUGH": 0.0, "STEPS_AVERAGED": 3, "SCENES": 2}.items():
        monkeypatch.setattr(f"models.shapes.train.{name}", value)
    assert len(list(train(make_model(), seed=0))) == 3


def test_the_probability_of_the_right_count_is_that_of_its_digit() -> None:
    torch.manual_seed(0)
    model: Any = make_model()
    draw = random.Random(0)
    scenes = [scene_example(draw) for _ in range(3)]
    alone = []
    for one in scenes:
        first = next(place for place, label in enumerate(one.labels) if label != NO_LOSS)
        seen = model(input_ids=torch.tensor([one.token_ids[:first]]), pixel_values=pixels_of(one.pictures))
        alone.append(seen.logits[0, -1].softmax(-1)[one.token_ids[first]].item())
    assert right_counts(learnt(model, scenes)) == pytest.approx(sum(alone) / 3, rel=1e-4)


def test_the_committed_weights_count_right_often_but_not_always() -> None:
    torch.manual_seed(0)
    processor: Any = Idefics3Processor.from_pretrained(MODEL)
    model = Idefics3ForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    infos = [sample["extra_env_info"] for sample in ShapesEnvironment().example_samples(100, 1)]
    said = replies(model, processor, [question_of(info) for info in infos])
    assert 35 <= sum(map(is_right, infos, said)) <= 75
    assert all(len(reply) == 1 and reply.isdecimal() for reply in said[:20])
    assert (MODEL / "model.safetensors").stat().st_size < 4_000_000


def test_the_committed_template_is_that_of_the_training() -> None:
    assert Path(MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE
