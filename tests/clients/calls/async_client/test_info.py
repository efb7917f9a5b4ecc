"""`info` and `check_tokenizer` against a scripted service."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_client.errors import TokenizerDiffers
from rollout_client.tokenizer_check import tokenizer_info, tokens_by_id
from tests.clients.client_calls import call
from tests.clients.scripted_service import INFO, Json, ScriptedService
from tests.paths import TINY_MODEL

tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)


def info_of(vocabulary_sha256: str | None = None) -> Json:
    described = tokenizer_info(tokenizer).model_dump()
    return INFO | {"tokenizer": described | ({"vocabulary_sha256": vocabulary_sha256} if vocabulary_sha256 else {})}


def test_info_is_what_the_service_says(service: ScriptedService) -> None:
    service.info = info_of()
    assert call(service.url, lambda client: client.info()).model_dump() == service.info


def test_the_same_tokenizer_is_checked_by_one_request(service: ScriptedService) -> None:
    service.info = info_of()
    call(service.url, lambda client: client.check_tokenizer(tokenizer))
    assert service.info_requests == ["/info"]


def test_another_vocabulary_is_fetched_to_name_what_differs(service: ScriptedService) -> None:
    service.info = info_of(vocabulary_sha256="other")
    service.vocabulary = [*tokens_by_id(tokenizer)[:-1], "<|fin|>"]
    with pytest.raises(TokenizerDiffers) as raised:
        call(service.url, lambda client: client.check_tokenizer(tokenizer))
    assert raised.value.differences == ["token 261 is '<|end|>' here and '<|fin|>' at the service"]
    assert service.info_requests == ["/info", "/info/vocabulary"]
