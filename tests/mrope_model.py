"""A tiny random Qwen2.5-VL: positions in three dimensions, and images of any size. Needs torchvision."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from tests.paths import TINY_MODEL
from tests.vision_model import TEMPLATE, random_weights

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCHES: dict[str, Any] = {
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
}


def save_mrope_model(folder: Path, seed: int = 0) -> Path:
    """Random weights in float32 and a byte tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    processors = (Qwen2VLImageProcessor(**PATCHES), tokenizer, Qwen2VLVideoProcessor(**PATCHES))
    Qwen2_5_VLProcessor(*processors, chat_template=tokenizer.chat_template).save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(MARKS)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 32,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    random_weights(Qwen2_5_VLForConditionalGeneration(config), seed).save_pretrained(folder)
    return folder
