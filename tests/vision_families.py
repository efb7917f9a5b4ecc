"""Tiny random models of the families that see, with the processors that transformers has for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
CLIP = {**VISION, "model_type": "clip_vision_model"}
ENDS = (("start", "begin"), ("end", "end"))
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
"""In three dimensions."""
INTERLEAVED = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


@dataclass(frozen=True)
class Family:
    """A family of models."""

    model_type: str
    image: str
    """What the chat template writes for an image."""
    tokens: Sequence[str]
    """Further tokens of the tokenizer."""
    processor: Callable[[Any], Any]
    """The processor for a tokenizer."""
    ids: Mapping[str, str]
    """The tokens whose ids the model's config has, by the names there."""
    vision: Mapping[str, Any]
    """The config of the vision part."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Of the language part's config."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the model's config."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens that the tokenizer has an attribute for."""
    words: Sequence[str] = ()
    """Tokens of text."""

    def save_processor(self, folder: Path) -> Any:
        """Writes all but the weights; returns the model's config."""
        tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL, extra_special_tokens=dict(self.named))
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.tokens]})
        tokenizer.add_tokens([*self.words])
        tokenizer.chat_template = TEMPLATE.replace("<image>", self.image)
        processor = self.processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.save_pretrained(folder)
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in self.ids.items()}
        parts = {"vision_config": dict(self.vision), "text_config": language_config(tokenizer) | dict(self.text)}
        config: Any = AutoConfig.for_model(self.model_type, **ids, **parts, **self.config)
        config.architectures = [hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__]
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


def clip(kind: str, **options: Any) -> Callable[[Any], Any]:
    def processor(tokenizer: Any) -> Any:
        made = getattr(hf, f"{kind}ImageProcessorPil")(size={"shortest_edge": EDGE}, crop_size=SQUARE, **options)
        named = kind.replace("CLIP", "Llava")
        return getattr(hf, f"{named}Processor")(made, tokenizer, PATCH, "default", num_additional_image_tokens=1)

    return processor


def llava_onevision(tokenizer: Any) -> Any:
    images = hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=PINPOINTS)
    return hf.LlavaOnevisionProcessor(images, tokenizer, hf.LlavaOnevisionVideoProcessor(size=SQUARE), PATCHES, "full")


def gemma3(tokenizer: Any) -> Any:
    return hf.Gemma3Processor(hf.Gemma3ImageProcessorPil(size=SQUARE), tokenizer, image_seq_length=4)


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


def qwen(model_type: str, name: str, text: Mapping[str, Any], videos: str = "Qwen2VL", **vision: Any) -> Family:
    start, pad, end, video = marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    processor = with_grids(f"{name}Processor", "Qwen2VLImageProcessor", f"{videos}VideoProcessor")
    ids = {"image_token_id": pad, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    text = {"model_type": f"{model_type}_text", "rope_parameters": ROPE, **text}
    return Family(model_type, start + pad + end, marks, processor, ids, {**GRID_VISION, **vision}, text)


GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 32,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
GLM4V_TEXT = {
    "model_type": "glm4v_text",
    "attention_bias": True,
    "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
}
IMAGE = {"image_token_index": "<image>"}
IMG = {"image_token_index": "[IMG]"}
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
PIXTRAL_VISION = {**VISION, "model_type": "pixtral", "image_size": 4 * EDGE}
INTERN_VISION = {**VISION, "image_size": [EDGE, EDGE], "patch_size": [PATCH, PATCH]}
GEMMA3_NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
INTERN_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GLM4V_IDS = {
    **{f"{kind}_{at}_token_id": f"<|{word}_of_{kind}|>" for kind in ("image", "video") for at, word in ENDS},
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
ONEVISION = {**IMAGE, "video_token_index": "<video>"}
GRID = {"image_grid_pinpoints": PINPOINTS}
LAST_LAYER = {"vision_feature_layer": -1}
FAMILIES: Mapping[str, Family] = {
    "llava": Family("llava", "<image>", ["<image>"], clip("CLIP"), IMAGE, CLIP),
    "llava_next": Family(*("llava_next", "<image>", ["<image>"], clip("LlavaNext", **GRID), IMAGE, CLIP), config=GRID),
    "llava_onevision": Family(
        *("llava_onevision", "<image>", ["<image>", "<video>"], llava_onevision, ONEVISION, SIGLIP),
        text={"model_type": "qwen2"},
        config=GRID,
    ),
    "gemma3": Family(
        *("gemma3", "<start_of_image>", [], gemma3),
        {f"{name}_index": token for name, token in GEMMA3_NAMED.items()},
        SIGLIP,
        GEMMA3_TEXT,
        {"mm_tokens_per_image": 4},
        GEMMA3_NAMED,
        ["\n" * count for count in range(1, 5)],
    ),
    "pixtral": Family(
        *("llava", "[IMG]", PIXTRAL, pixtral(1), IMG, PIXTRAL_VISION, {"model_type": "mistral"}),
        {**LAST_LAYER, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Family(
        *("mistral3", "[IMG]", PIXTRAL, pixtral(2), IMG, PIXTRAL_VISION, {"model_type": "mistral"}),
        {**LAST_LAYER, "spatial_merge_size": 2},
    ),
    "internvl": Family(
        *("internvl", "<IMG_CONTEXT>", [], internvl, {"image_token_id": "<IMG_CONTEXT>"}, INTERN_VISION),
        {"model_type": "qwen2"},
        {"image_seq_length": PATCHES // 4},
        INTERN_NAMED,
    ),
    "glm4v": Family(
        "glm4v",
        "<|begin_of_image|><|image|><|end_of_image|>",
        [*GLM4V_IDS.values()],
        with_grids("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
        GLM4V_IDS,
        {**GRID_VISION, "image_size": 4 * EDGE},
        GLM4V_TEXT,
    ),
    "qwen2_vl": qwen("qwen2_vl", "Qwen2VL", {}, embed_dim=64, mlp_ratio=2),
    "qwen2_5_vl": qwen("qwen2_5_vl", "Qwen2_5_VL", {}, window_size=32, fullatt_block_indexes=[1]),
    "qwen3_vl": qwen(
        *("qwen3_vl", "Qwen3VL", {"rope_parameters": INTERLEAVED}, "Qwen3VL"),
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
}
