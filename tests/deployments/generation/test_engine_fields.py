"""The fields of vLLM's engine arguments, without importing vLLM."""

import sys
from importlib.machinery import PathFinder

import pytest

from deployments.generation import settings as module
from deployments.generation.settings import engine_fields


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
