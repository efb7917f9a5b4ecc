"""A tiny random model that sees, and pictures to show it."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.idefics3.configuration_idefics3 import Idefics3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3ForConditionalGeneration
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from benchmarks.reference_model import chosen, spans_of
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import image_inputs, to_tensors
from tests.paths import TINY_MODEL

TILE = 64
"""Edge in pixels of a tile, into which larger pictures are split."""
TOKENS_OF_TILE = 16
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def vision_tokenizer() -> Any:
    """The embedded model's, with the tokens of pictures and a template that takes parts."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS + rows})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def language_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def save_vision_model(folder: Path, seed: int = 0) -> Path:
    """Idefics3 with random weights in float32, a byte tokenizer, and pictures that are split into tiles."""
    tokenizer = vision_tokenizer()
    size, tile = {"longest_edge": 2 * TILE}, {"longest_edge": TILE}
    pictures = Idefics3ImageProcessorPil(do_image_splitting=True, size=size, max_image_size=tile)
    Idefics3Processor(pictures, tokenizer, image_seq_len=TOKENS_OF_TILE).save_pretrained(folder)
    config = Idefics3Config(
        text_config={**language_config(tokenizer), "tie_word_embeddings": False},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 8,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    random_weights(model, seed).save_pretrained(folder)
    return folder


def random_weights(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.eval()


def picture(width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    """A file with random pixels; equal seeds give equal ones."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


SAMPLED_PLACEHOLDER = -1
"""transformers takes each placeholder for a part of an image. One that was sampled is a token, as for the engine."""


class SeenByTransformers:
    """Log-probabilities of the tokens of a rollout, by transformers with the pictures themselves."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.placeholder = model.config.image_token_id

        def as_token(_module: object, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (args[0].masked_fill(args[0] == SAMPLED_PLACEHOLDER, self.placeholder),)

        model.get_input_embeddings().register_forward_pre_hook(as_token)
        self.processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]

    def differences(self, result: SampleResult, pictures: Mapping[str, bytes]) -> torch.Tensor:
        """Of each generated token: the recorded log-probability less the one that is computed anew."""
        rollouts = [result.model_copy(update={"total_reward": 0.0})]
        tensors = to_tensors(rollouts, pad_token_id=0)
        inputs = image_inputs(rollouts, tensors, pictures, self.processor)
        sampled = (tensors.input_ids == self.placeholder) & tensors.loss_mask.bool()
        inputs["input_ids"] = tensors.input_ids.masked_fill(sampled, SAMPLED_PLACEHOLDER)
        with torch.inference_mode():
            expected = chosen(self.model(**inputs).logits[0].log_softmax(-1), tensors.input_ids[0])
        return torch.cat([said - expected[places] for _, places, said in spans_of(result)])
