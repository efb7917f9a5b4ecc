"""The vendors' chat templates: as TRL ships them, over a tokenizer of bytes with their markers as special tokens; and
with the vendors' own tokenizers, where `ROLLOUT_TOKENIZERS` names them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.chat.tokenizer_loading import load_tokenizer
from tests.deployments.chat.real_tokenizers import folder_of, template_of, wanted
from tests.paths import TINY_MODEL

MARKER = re.compile(r"<\|[^<>|\s{}]+\|>|<｜[^<>｜\s{}]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>")


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of a family generate at the end of a turn, and how their template takes calls."""

    end: str
    """The tokens at the end of an answer."""
    eos: str = ""
    """The tokenizer's own end token, if it is not the last of `end`."""
    arguments: Any = None
    """A call's arguments as the template takes them; `None`: it writes no calls."""
    end_of_calls: str = ""
    """The tokens at the end of an answer that makes calls, if they are others."""
    further_ends: tuple[str, ...] = ()
    """Ends of the generation config."""
    at_most_one_call: bool = False
    text_before_calls: str = "Hm."
    """Empty for families that write an answer's text elsewhere."""
    refuses_text_beside_calls: bool = False
    moves_instructions: bool = False
    """Whether the template writes the system prompt and the tools before the last question, wherever that is."""
    has_null_beside_calls: bool = False
    """Whether the template writes calls only where their message has no content."""
    answer: str = "{}"
    """What a model samples for an answer without calls."""
    departures: frozenset[str] = frozenset()
    """The traits of a conversation that the template writes otherwise in a history."""

    def end_after(self, calls: Sequence[Any]) -> str:
        return self.end_of_calls if calls and self.end_of_calls else self.end


OBJECT = {"a": 41}
TRIMMED = frozenset({"white space around answers"})
GEMMA4 = Family("<turn|>", "<eos>", OBJECT, "<|tool_response>", ("<|tool_response>",), False, "")
OF_IM_END = [
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_v2"),
    *(f"nemotron_3_{kind}" for kind in ("5_lightning", "nano", "super", "ultra")),
    *(f"qwen3_{kind}" for kind in ("5_nothink", "5_think", "6", "8", "instruct_2507")),
]
FAMILIES = {
    **dict.fromkeys(["diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"], GEMMA4),
    **dict.fromkeys(OF_IM_END, Family("<|im_end|>", arguments=OBJECT)),
    **dict.fromkeys(["phi3", "phi3_5"], Family("<|end|>", "<|endoftext|>")),
    "cohere": Family("<|END_OF_TURN_TOKEN|>"),
    "cohere2": Family("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": Family("<｜end▁of▁sentence｜>"),
    "deepseekv3": Family("<｜end▁of▁sentence｜>", arguments='{"a": 41}'),
    "gemma": Family("<end_of_turn>", "<eos>"),
    "gemma3": Family("<end_of_turn>", "<eos>", departures=TRIMMED),
    "gemma4_v2": Family("<turn|>", "<eos>", OBJECT, text_before_calls=""),
    "glm4moe": Family("<|user|>", "<|endoftext|>", OBJECT, "<|observation|>", ("<|user|>", "<|observation|>")),
    "gptoss": Family(
        *("<|end|>", "<|return|>", '{"a": 41}', "<|call|>", ("<|call|>",), True, ""),
        answer="<|channel|>final<|message|>{}",
        departures=frozenset({"text beside calls"}),
    ),
    "lfm2": Family("<|im_end|>"),
    "llama3": Family("<|eot_id|>"),
    "llama3_1": Family(
        *("<|eot_id|>", "", OBJECT, "<|eot_id|>", ("<|eom_id|>",), True, ""), departures=TRIMMED | {"text beside calls"}
    ),
    "llama3_2": Family("<|eot_id|>", "", OBJECT, "<|eot_id|>", ("<|eom_id|>",), True, ""),
    "muse_glimmer": Family("<|eot|>", arguments=OBJECT),
    "qwen2_5": Family("<|im_end|>", arguments=OBJECT, further_ends=("<|endoftext|>",)),
    "qwen3": Family(
        *("<|im_end|>", "", OBJECT, "", ("<|endoftext|>",)), departures=frozenset({"thoughts", "thinking off"})
    ),
}

REAL_FAMILIES = {
    "qwen3": FAMILIES["qwen3"],
    "llama3_1": FAMILIES["llama3_1"],
    "gemma3": FAMILIES["gemma3"],
    "deepseek_v3": Family(
        *("<｜end▁of▁sentence｜>", "", '{"a": 41}'),
        has_null_beside_calls=True,
        departures=frozenset({"one call", "later calls", "text beside calls"}),
    ),
    "gptoss": FAMILIES["gptoss"],
    "mistral": Family(
        *("</s>", "", OBJECT, "", (), False, "", True),
        moves_instructions=True,
        departures=frozenset({"a system prompt"}),
    ),
    "smollm2": Family("<|im_end|>", further_ends=("<|endoftext|>",)),
}
REAL = {f"real {name}": REAL_FAMILIES[name] for name in wanted()}
ALL = FAMILIES | REAL


def call(place: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{place}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(place: int, content: str, name: str = "") -> Any:
    named = {"name": name} if name else {}
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{place}", **named}


class Vendor:
    """A family's template, and the service's tokenizer with it."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        self.family = family
        self.hf = tokenizer
        further = tokenizer.convert_tokens_to_ids([*family.further_ends])
        self.tokens = TransformersChatTokenizer(tokenizer, further_ends_of_turn=further)

    def rendered(self, chat: list[Any], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        return str(
            self.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)
        )

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        return ids

    def text_of(self, ids: list[int]) -> str:
        # The tokenizer's own method cleans spaces up, where its config says so.
        return str(self.hf.decode(ids, clean_up_tokenization_spaces=False))


def vendor_of_bytes(family: Family, template: str) -> Vendor:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    eos = family.eos or MARKER.findall(family.end)[-1]
    markers = {*MARKER.findall(template), *MARKER.findall(family.end), *family.further_ends, family.end_of_calls}
    special = [AddedToken(text, special=True, normalized=False) for text in sorted(markers - {"", eos})]
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": eos})
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = template
    return Vendor(family, tokenizer)


@lru_cache
def vendor(name: str) -> Vendor:
    if name in REAL:
        return Vendor(REAL[name], load_tokenizer(str(folder_of(name.removeprefix("real ")))))
    return vendor_of_bytes(FAMILIES[name], template_of(name))


def marked(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test, those of real tokenizers, which take seconds to load, with their markers."""
    marks = [pytest.mark.tokenizers, pytest.mark.slow]
    return [pytest.param(name, marks=marks * (name in REAL)) for name in names]
