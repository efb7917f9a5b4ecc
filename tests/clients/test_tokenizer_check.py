"""Tokenizers that differ from the service's are found, with what differs; a tokenizer that was saved again is equal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_client.contract.info import ServiceInfo
from rollout_client.errors import TokenizerDiffers
from rollout_client.tokenizer_check import (
    check_tokenizer,
    differences_of,
    has_other_vocabulary,
    tokenizer_info,
    tokens_by_id,
)
from tests.clients.scripted_service import INFO, Json
from tests.paths import TINY_MODEL

VOCABULARY_SIZE = 262


def load(folder: Path = TINY_MODEL) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def changed(folder: Path, change: Callable[[Json], None]) -> Any:
    """The embedded model's tokenizer with another `tokenizer.json`."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, folder / name)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load(folder)


def service_info(tokenizer: Any, vocab_size: int = VOCABULARY_SIZE) -> ServiceInfo:
    model = INFO["model"] | {"vocab_size": vocab_size}
    return ServiceInfo.model_validate(INFO | {"model": model, "tokenizer": tokenizer_info(tokenizer)})


def test_a_tokenizer_equals_one_that_was_saved_used_and_loaded_again(tmp_path: Path) -> None:
    tokenizer = load()
    # What a trainer's tokenizer goes through.
    tokenizer(["a", "long text"], padding=True, truncation=True, max_length=4)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_info(load(tmp_path)) == tokenizer_info(load()) == tokenizer_info(tokenizer)
    check_tokenizer(load(tmp_path), service_info(load()), None)


def test_the_encodings_are_those_of_the_tokenizer_without_special_tokens() -> None:
    tokenizer = load()
    for encoding in tokenizer_info(tokenizer).encodings:
        assert tokenizer.decode(encoding.token_ids) == encoding.text


def test_tokens_with_other_ids_are_named(tmp_path: Path) -> None:
    def swap(content: Json) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    ours, theirs = changed(tmp_path, swap), load()
    assert has_other_vocabulary(ours, service_info(theirs))
    with pytest.raises(TokenizerDiffers) as raised:
        check_tokenizer(ours, service_info(theirs), tokens_by_id(theirs))
    assert str(raised.value) == (
        "The tokenizer is not the service's: token 97 is 'b' here and 'a' at the service; "
        "token 98 is 'a' here and 'b' at the service."
    )


def test_of_many_different_tokens_the_first_are_named_the_rest_counted() -> None:
    tokenizer = load()
    theirs = [*tokens_by_id(tokenizer)[:-5], "x", "y"]
    assert list(differences_of(tokenizer, service_info(tokenizer), theirs)) == [
        "token 257 is '<|system|>' here and 'x' at the service",
        "token 258 is '<|user|>' here and 'y' at the service",
        "token 259 is '<|assistant|>' here and missing at the service",
        "2 more tokens differ",
    ]


def test_equal_vocabularies_that_split_a_text_in_another_way_differ(tmp_path: Path) -> None:
    def prefix_with_a_space(content: Json) -> None:
        content["pre_tokenizer"]["add_prefix_space"] = True

    ours, theirs = changed(tmp_path, prefix_with_a_space), load()
    info = service_info(theirs)
    assert not has_other_vocabulary(ours, info)
    first, *_ = differences_of(ours, info)
    ids = info.tokenizer.encodings[0].token_ids
    assert first == (
        f"the text {info.tokenizer.encodings[0].text!r} has the tokens {[32, *ids]} here and {ids} at the service"
    )


def test_a_tokenizer_with_more_ids_than_the_model_differs() -> None:
    tokenizer = load()
    assert list(differences_of(tokenizer, service_info(tokenizer, vocab_size=261))) == [
        "the tokenizer has token ids up to 261, and the service's model has only those below 261"
    ]


def test_a_chat_template_differs_only_if_it_renders_in_another_way() -> None:
    ours, info = load(), service_info(load())
    template = ours.chat_template
    ours.chat_template = "{# marked for training #}" + template
    check_tokenizer(ours, info, None)
    ours.chat_template = template + "\n"
    check_tokenizer(ours, info, None)
    ours.chat_template = template.replace("<|end|>", "</s>")
    [difference] = differences_of(ours, info)
    assert difference == (
        "the chat template makes "
        "'<|user|>\\nQuestion</s>\\n<|assistant|>\\nAnswer</s>\\n<|user|>\\nAnd then?</s>\\n<|assistant|>\\n' "
        "of a short chat here and "
        "'<|user|>\\nQuestion<|end|>\\n<|assistant|>\\nAnswer<|end|>\\n<|user|>\\nAnd then?<|end|>\\n<|assistant|>\\n' "
        "at the service"
    )
    ours.chat_template = "{{ raise_exception('no') }}"
    assert next(differences_of(ours, info)).startswith("the chat template makes nothing of a short chat here and '<|us")


def test_a_trainer_without_a_chat_template_does_not_differ() -> None:
    ours, info = load(), service_info(load())
    ours.chat_template = None
    check_tokenizer(ours, info, None)
