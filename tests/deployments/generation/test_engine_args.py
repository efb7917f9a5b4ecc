"""Arguments of vLLM that are passed through: those refused, those that change what is sampled; all were looked at."""

import asyncio
import re
import sys
from hashlib import sha256
from importlib.machinery import PathFinder
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.generation import settings as module
from deployments.generation.settings import INEXACT_ENGINE_ARGS, RESERVED_ENGINE_ARGS, EngineSettings, engine_fields
from tests.paths import REPOSITORY, TINY_MODEL

[REFUSED, TAKEN] = [
    {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    for table in (REPOSITORY / "docs/deploy.md")
    .read_text()
    .partition("## Settings of vLLM that change what is sampled\n")[2]
    .partition("\n## ")[0]
    .split("These are taken")
]
OTHERS = "248383a4000f492dd7b70555bf97dc03791e8f41fc1f14d3bf77946be9ba02b3"
"""SHA-256 of the names of the 208 further fields, which change at most the last bits of log-probabilities."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
VALUES: dict[str, Any] = {"watermark_config": {"key": 1}, "spec_tokens": 2}
CARD, PROCESSORS, HOST = {"device": "gpu"}, {"device": "cpu"}, {"async_scheduling": True}
NOT_KEPT = "only rejection_sample_method: standard is known to keep the distribution"
BETWEEN = r"async_scheduling: speculative_config\.method '\w+' drafts between two steps\. Leave it out"


@pytest.mark.parametrize("name", sorted(INEXACT_ENGINE_ARGS))
def test_what_breaks_exactness_or_the_record_is_refused_if_it_is_set(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name} would break exactness or the record \(docs/deploy\.md"):
        EngineSettings.model_validate({"model": "m", name: VALUES.get(name, True)})
    for nothing in list[Any]([None, False, {}, [], ""]):
        EngineSettings.model_validate({"model": "m", name: nothing})


@pytest.mark.parametrize(
    ("drafts", "beside", "sentence"),
    [
        ({"method": "ngram_gpu"}, PROCESSORS, "method: 'ngram_gpu' is none of those for processors: ngram, draft_"),
        ({"method": "extract_hidden_states"}, CARD, "'extract_hidden_states' is none of those for GPUs: ngram"),
        ({"model": "m"}, CARD, "speculative_config.method: None is none of those for GPUs"),
        ({"method": "suffix"}, CARD, "'suffix' needs the package arctic-inference, which is not installed"),
        ({"rejection_sample_method": "block"}, CARD, NOT_KEPT),
        ({"synthetic_acceptance_length": 2.0}, PROCESSORS, NOT_KEPT),
        ({"rejection-sample-method": "block"}, CARD, NOT_KEPT),
        ({"num_speculative_tokens": 129}, CARD, "num_speculative_tokens: 129; at most 128 are verified in one step"),
        ({"method": "custom_class"}, CARD | HOST, BETWEEN),
        ({}, PROCESSORS | HOST, BETWEEN),
    ],
)
def test_drafts_that_would_not_be_exact_or_not_start_are_refused_in_a_sentence(
    drafts: dict[str, Any], beside: dict[str, Any], sentence: str
) -> None:
    drafts = drafts if "model" in drafts else DRAFTS | drafts
    with pytest.raises(ValidationError, match=sentence):
        EngineSettings.model_validate({"model": "m", "speculative_config": drafts, **beside})


@pytest.mark.parametrize("method", ["ngram", "draft_model", "custom_class"])
def test_drafts_that_are_exact_are_passed_through(method: str) -> None:
    drafts = DRAFTS | {"method": method}
    settings = EngineSettings.model_validate({"model": "m", "speculative_config": drafts, "device": "cpu"})
    assert settings.engine_args()["speculative_config"] == drafts


OFFLOADS, OTHER = {"kv_offloading_size": 8}, {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({**OFFLOADS, **PROCESSORS}, "kv_offloading_size: 8 GiB cannot be used with device: cpu, as vLLM offloads"),
        ({"kv_offloading_size": 0}, "kv_offloading_size: 0 is no number of GiB above 0, of host memory for one"),
        ({"kv_offloading_size": "8"}, "kv_offloading_size: '8' is no number of GiB above 0"),
        ({**OFFLOADS, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend: 'lmcache' keeps blocks in another"),
        ({"kv_offloading_backend": "native"}, "kv_offloading_backend: 'native' does nothing alone. Set kv_offloading_"),
        ({**OFFLOADS, "kv_transfer_config": OTHER}, "kv_connector: vLLM replaces 'NixlConnector' with its own"),
    ],
)
def test_offloading_that_would_not_start_or_be_ignored_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        EngineSettings.model_validate({"model": "m", **given})


def test_random_weights_are_refused_and_other_formats_of_weights_are_taken() -> None:
    with pytest.raises(ValidationError, match="load_format: dummy makes random weights, which would be recorded as"):
        EngineSettings.model_validate({"model": "m", "load_format": "dummy"})
    assert EngineSettings.model_validate({"model": "m", "load_format": "safetensors"})


def test_the_page_names_all_that_is_refused_or_changes_what_is_sampled() -> None:
    assert {*INEXACT_ENGINE_ARGS, *RESERVED_ENGINE_ARGS, "load_format"} == REFUSED
    settings = EngineSettings.model_validate(
        {"model": "m", **dict.fromkeys(TAKEN, "x"), "dtype": "auto", "speculative_config": DRAFTS, **OFFLOADS}
        | {"kv_offloading_backend": "native", "kv_transfer_config": {}}
    )
    assert settings.engine_args().keys() >= TAKEN


def test_each_field_of_vllms_was_looked_at_before_it_is_passed_through() -> None:
    others = sorted(set(engine_fields() or ()) - REFUSED - TAKEN)
    assert sha256(" ".join(others).encode()).hexdigest() == OTHERS, "compare them with those of the vLLM before"


@pytest.mark.slow
def test_no_engine_starts_that_would_draft_tokens_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that name a model for which they draft let vLLM do it without a setting."""
    from vllm.engine import arg_utils

    from deployments.generation.engine import VLLMEngine

    monkeypatch.setattr(
        arg_utils, "maybe_override_with_speculators", lambda model, tokenizer, **_: (model, tokenizer, dict(DRAFTS))
    )
    with pytest.raises(ValueError, match=r"models/tiny names a model that drafts \(ngram\), which nobody asked"):
        asyncio.run(VLLMEngine.start({"model": str(TINY_MODEL), "max_model_len": 256}))


@pytest.mark.slow
def test_no_engine_starts_whose_method_of_drafting_is_another_than_those_that_are_exact() -> None:
    from deployments.generation.engine import VLLMEngine

    drafts = {**DRAFTS, "method": "ngram_gpu"}
    with pytest.raises(ValueError, match=r"vLLM makes 'ngram_gpu' of it, which is none of the methods"):
        asyncio.run(VLLMEngine.start({"model": str(TINY_MODEL), "max_model_len": 256, "speculative_config": drafts}))


def test_the_fields_of_both_classes_are_found_without_importing_vllm() -> None:
    imported = "vllm" in sys.modules
    fields = engine_fields()
    assert fields is not None
    assert {"max_num_seqs", "enable_lora", "weight_transfer_config", "enable_log_requests"} <= fields
    assert not {"max_num_seq", "from_cli_args", "__post_init__"} & fields
    assert ("vllm" in sys.modules) is imported


def test_nothing_is_known_where_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: PathFinder.find_spec(name, []))
    assert engine_fields() is None
