"""Folders of models whose tokenizer transformers reads in another way than their `tokenizer.json` says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.byt5 import ByT5Tokenizer
from transformers.utils.import_utils import is_torch_available

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.chat.tokenizer_loading import leave_torch_out, load_tokenizer, refuse_lossy, refuse_slow
from deployments.protocols.chat import ChatOptions, UnsupportedTokenizer
from tests.paths import SMALL_MODEL

QUESTION: Any = [{"role": "user", "content": "Say  two\nthings: 中文."}]


def folder_of(path: Path, model_type: str, tokenizer_class: str) -> Path:
    """A copy of the small model's tokenizer, in the folder of a model of another type."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMALL_MODEL / name, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": tokenizer_class}))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def loaded_ids(folder: Path) -> list[int]:
    parts = TransformersChatTokenizer.load(str(folder)).prompt_ids(QUESTION, ChatOptions(), 1000)
    return [token_id for part in parts for token_id in part]


def test_a_tekken_file_beside_the_tokenizers_changes_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "mistral", "PreTrainedTokenizerFast")
    (folder / "tekken.json").write_text("{}")
    assert loaded_ids(folder) == loaded_ids(SMALL_MODEL)


def test_a_tekken_file_alone_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json.*convert_tekken_tokenizer.*engine\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_class_that_rebuilds_the_tokenizer_in_another_way_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", "LlamaTokenizerFast")
    rebuilt: Any = AutoTokenizer.from_pretrained(folder)
    assert rebuilt.decode(rebuilt.encode("two  words\n中文", add_special_tokens=False)) != "two  words\n中文"
    with pytest.raises(
        UnsupportedTokenizer, match=r'as LlamaTokenizer, .*"tokenizer_class": "PreTrainedTokenizerFast"'
    ):
        TransformersChatTokenizer.load(str(folder))


def test_a_tokenizer_saved_by_a_wrong_class_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", "LlamaTokenizerFast")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    load_tokenizer(str(folder))
    with pytest.raises(UnsupportedTokenizer, match="loses text: 'Hello, world!' comes back"):
        TransformersChatTokenizer.load(str(folder))


def test_characters_that_a_vocabulary_does_not_have_are_no_loss() -> None:
    backend = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    refuse_lossy(make(tokenizer_object=backend, unk_token="?"))


def test_a_slow_tokenizer_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"\(ByT5Tokenizer\) is a slow one.*folder with a tokenizer\.json"):
        refuse_slow(ByT5Tokenizer())


def test_a_folder_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedTokenizer, match=f"The tokenizer of {tmp_path} cannot be loaded: "):
        load_tokenizer(str(tmp_path))


@pytest.mark.long
@pytest.mark.slow
def test_an_ingress_loads_its_tokenizer_without_torch() -> None:
    program = f"""
import sys
import service.ingress
from deployments.chat.tokenizer_loading import end_tokens_of, leave_torch_out, load_tokenizer

leave_torch_out()
assert load_tokenizer({str(SMALL_MODEL)!r}).is_fast
end_tokens_of({str(SMALL_MODEL)!r}, None)
assert "torch" not in sys.modules
import torch
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_that_has_torch_keeps_it_for_transformers() -> None:
    pytest.importorskip("torch")
    leave_torch_out()
    assert is_torch_available()
