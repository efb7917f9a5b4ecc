"""Tiny random models of the families that see, with the processors that transformers has for them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from tests.paths import TINY_MODEL
from tests.vision_model import TEMPLATE, language_config, random_weights

hf: Any = transformers
"""Its classes that need torchvision have types only where that is installed."""
EDGE, PATCH = 32, 8
"""Of an image or its tile, and of what becomes one embedding of it, in pixels."""
PATCHES = (EDGE // PATCH) ** 2
SQUARE = {"height": EDGE, "width": EDGE}
PINPOINTS = [[EDGE, 2 * EDGE], [2 * EDGE, EDGE], [2 * EDGE, 2 * EDGE]]
VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": EDGE,
    "patch_size": PATCH,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
GRIDS: Mapping[str, Any] = {
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
}
"""Of processors that take images of any size."""
GRID_VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
"""In three dimensions."""
INTERLEAVED = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


class Family:
    """A family of models.

    Args:
        image: what the chat template writes for an image.
        tokens: further tokens of the tokenizer.
        processor: the processor for a tokenizer.
        config: the model's, but for the language part, for the ids of tokens.
        text: of the language part's config.
        named: tokens that the tokenizer has an attribute for.
        words: tokens of text.
    """

    def __init__(
        self,
        image: str,
        tokens: list[str],
        processor: Callable[[Any], Any],
        config: Callable[[Callable[[str], int]], dict[str, Any]],
        text: Mapping[str, Any] | None = None,
        named: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
    ) -> None:
        self._image, self._tokens, self._named, self._words = image, tokens, named or {}, words
        self._processor, self._config, self._text = processor, config, dict(text or {})

    def save_processor(self, folder: Path) -> Any:
        """Writes all but the weights; returns the model's config."""
        tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL, extra_special_tokens=dict(self._named))
        tokenizer.add_special_tokens({"additional_special_tokens": self._tokens})
        tokenizer.add_tokens([*self._words])
        tokenizer.chat_template = TEMPLATE.replace("<image>", self._image)
        processor = self._processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.save_pretrained(folder)
        given = self._config(tokenizer.convert_tokens_to_ids)
        config: Any = AutoConfig.for_model(**given, text_config=language_config(tokenizer) | self._text)
        model_class = hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        return config

    def save(self, folder: Path, seed: int = 0) -> Path:
        """Random weights in float32, and a byte tokenizer."""
        model = AutoModelForImageTextToText.from_config(self.save_processor(folder))  # type: ignore[no-untyped-call]
        random_weights(model, seed).save_pretrained(folder)
        if model.config.vision_config.model_type in ("clip_vision_model", "siglip_vision_model"):
            nest_tower(folder / "model.safetensors")
        return folder


def nest_tower(file: Path) -> None:
    """Gives the tower's tensors the names that they have in checkpoints of the Hub, which vLLM loads."""
    tensors = load_file(file)
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): tensors[name] for name in tensors}
    save_file(named, file, {"format": "pt"})


def llava(tokenizer: Any) -> Any:
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size=SQUARE)
    return hf.LlavaProcessor(images, tokenizer, PATCH, "default", num_additional_image_tokens=1)


def llava_next(tokenizer: Any) -> Any:
    images = hf.LlavaNextImageProcessorPil(
        size={"shortest_edge": EDGE}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
    )
    return hf.LlavaNextProcessor(images, tokenizer, PATCH, "default", num_additional_image_tokens=1)


def llava_onevision(tokenizer: Any) -> Any:
    images = hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=PINPOINTS)
    videos = hf.LlavaOnevisionVideoProcessor(size=SQUARE)
    return hf.LlavaOnevisionProcessor(images, tokenizer, videos, PATCHES, "full")


def gemma3(tokenizer: Any) -> Any:
    images = hf.Gemma3ImageProcessorPil(size=SQUARE)
    return hf.Gemma3Processor(images, tokenizer, image_seq_length=4)


def pixtral(merged: int) -> Callable[[Any], Any]:
    def processor(tokenizer: Any) -> Any:
        images = hf.PixtralImageProcessorPil(size={"longest_edge": 4 * EDGE}, patch_size=PATCH)
        return hf.PixtralProcessor(images, tokenizer, PATCH, merged)

    return processor


def internvl(tokenizer: Any) -> Any:
    images = hf.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=4)
    videos = hf.InternVLVideoProcessor(size=SQUARE)
    return hf.InternVLProcessor(images, tokenizer, videos, image_seq_length=PATCHES // 4)


def with_grids(name: str, images: str, videos: str) -> Callable[[Any], Any]:
    def processor(tokenizer: Any) -> Any:
        made = (getattr(hf, images)(**GRIDS), tokenizer, getattr(hf, videos)(**GRIDS))
        return getattr(hf, name)(*made)

    return processor


def qwen(model_type: str, text: Mapping[str, Any], **vision: Any) -> Family:
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[model_type]
    videos = "Qwen3VLVideoProcessor" if model_type == "qwen3_vl" else "Qwen2VLVideoProcessor"
    start, pad, end, video = marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    return Family(
        start + pad + end,
        marks,
        with_grids(f"{name}Processor", "Qwen2VLImageProcessor", videos),
        lambda id_of: {
            "model_type": model_type,
            "image_token_id": id_of(pad),
            "video_token_id": id_of(video),
            "vision_start_token_id": id_of(start),
            "vision_end_token_id": id_of(end),
            "vision_config": {**GRID_VISION, **vision},
        },
        {
            "model_type": f"{model_type}_text",
            "rope_parameters": ROPE,
            **text,
        },
    )


GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 32,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
FAMILIES: Mapping[str, Family] = {
    "llava": Family(
        "<image>",
        ["<image>"],
        llava,
        lambda id_of: {
            "model_type": "llava",
            "image_token_index": id_of("<image>"),
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
    ),
    "llava_next": Family(
        "<image>",
        ["<image>"],
        llava_next,
        lambda id_of: {
            "model_type": "llava_next",
            "image_token_index": id_of("<image>"),
            "image_grid_pinpoints": PINPOINTS,
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
    ),
    "llava_onevision": Family(
        "<image>",
        ["<image>", "<video>"],
        llava_onevision,
        lambda id_of: {
            "model_type": "llava_onevision",
            "image_token_index": id_of("<image>"),
            "video_token_index": id_of("<video>"),
            "image_grid_pinpoints": PINPOINTS,
            "vision_config": SIGLIP,
        },
        {"model_type": "qwen2"},
    ),
    "gemma3": Family(
        "<start_of_image>",
        [],
        gemma3,
        lambda id_of: {
            "model_type": "gemma3",
            "boi_token_index": id_of("<start_of_image>"),
            "eoi_token_index": id_of("<end_of_image>"),
            "image_token_index": id_of("<image_soft_token>"),
            "mm_tokens_per_image": 4,
            "vision_config": SIGLIP,
        },
        GEMMA3_TEXT,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        ["\n" * count for count in range(1, 5)],
    ),
    "pixtral": Family(
        "[IMG]",
        PIXTRAL,
        pixtral(1),
        lambda id_of: {
            "model_type": "llava",
            "image_token_index": id_of("[IMG]"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_config": {**VISION, "model_type": "pixtral", "image_size": 4 * EDGE},
        },
        {"model_type": "mistral"},
    ),
    "mistral3": Family(
        "[IMG]",
        PIXTRAL,
        pixtral(2),
        lambda id_of: {
            "model_type": "mistral3",
            "image_token_index": id_of("[IMG]"),
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "vision_config": {**VISION, "model_type": "pixtral", "image_size": 4 * EDGE},
        },
        {"model_type": "mistral"},
    ),
    "internvl": Family(
        "<IMG_CONTEXT>",
        [],
        internvl,
        lambda id_of: {
            "model_type": "internvl",
            "image_token_id": id_of("<IMG_CONTEXT>"),
            "image_seq_length": PATCHES // 4,
            "vision_config": {**VISION, "image_size": [EDGE, EDGE], "patch_size": [PATCH, PATCH]},
        },
        {"model_type": "qwen2"},
        INTERN,
    ),
    "glm4v": Family(
        "<|begin_of_image|><|image|><|end_of_image|>",
        [f"<|{place}_of_{kind}|>" for kind in ("image", "video") for place in ("begin", "end")]
        + ["<|image|>", "<|video|>"],
        with_grids("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
        lambda id_of: {
            "model_type": "glm4v",
            "image_token_id": id_of("<|image|>"),
            "video_token_id": id_of("<|video|>"),
            "image_start_token_id": id_of("<|begin_of_image|>"),
            "image_end_token_id": id_of("<|end_of_image|>"),
            "video_start_token_id": id_of("<|begin_of_video|>"),
            "video_end_token_id": id_of("<|end_of_video|>"),
            "vision_config": {**GRID_VISION, "image_size": 4 * EDGE},
        },
        {
            "model_type": "glm4v_text",
            "attention_bias": True,
            "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
        },
    ),
    "qwen2_vl": qwen("qwen2_vl", {}, embed_dim=64, mlp_ratio=2),
    "qwen2_5_vl": qwen("qwen2_5_vl", {}, window_size=32, fullatt_block_indexes=[1]),
    "qwen3_vl": qwen(
        "qwen3_vl",
        {"rope_parameters": INTERLEAVED},
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
}
