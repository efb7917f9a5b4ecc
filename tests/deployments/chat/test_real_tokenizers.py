"""The tokenizers of vendors as the service loads them: which it takes, which it refuses, and that no text is lost."""

import json
import re
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers import AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions, UnsupportedTokenizer
from tests.deployments.chat.observed import observed
from tests.deployments.chat.real_tokenizers import TEKKEN, folder_of, package_folder, wanted
from tests.deployments.chat.vendors import REAL, vendor

pytestmark = [pytest.mark.slow, pytest.mark.tokenizers]

REQUESTED = pytest.mark.parametrize("name", REAL)
CHAT, RAW, ROOM = ChatOptions(), ChatOptions(observation_format="raw"), 2**21
texts = st.one_of(
    st.text(max_size=30), st.text(alphabet="ab 1\u00e9\u6f22\n\t\U0001f642\U0001f44d\U0001f3fd'{<|", max_size=30)
)
LOST = {"real smollm2": re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")}
"""Characters whose bytes a vocabulary does not have: they have no tokens. `docs/deploy.md` says so."""


def copy_of(name: str, folder: Path, **named: str) -> Path:
    """The folder of a family with another tokenizer's config."""
    shutil.copytree(folder_of(name), folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    return folder


@REQUESTED
def test_the_service_loads_it_with_its_checks(name: str) -> None:
    one = vendor(name)
    loaded = TransformersChatTokenizer.load(str(folder_of(name.removeprefix("real "))))
    assert loaded.info.vocabulary_size == len(one.hf)
    assert one.hf.convert_tokens_to_ids(one.family.end) in loaded.ends_of_turn


@pytest.mark.parametrize("name", [name for name in wanted() if name == "deepseek_v3"])
def test_a_class_that_loses_spaces_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    # As the package has it: without a model, the class of the tokenizer's config counts.
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match=r"'Hello,world!', in other tokens.*PreTrainedTokenizerFast"):
        TransformersChatTokenizer.load(str(folder))
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "saved")
    with pytest.raises(UnsupportedTokenizer, match="loses text: 'Hello, world!' comes back"):
        TransformersChatTokenizer.load(str(folder / "saved"))
    fast = copy_of(name, folder, tokenizer_class="PreTrainedTokenizerFast")
    (fast / "config.json").unlink()
    assert TransformersChatTokenizer.load(str(fast)).info.encodings == vendor(f"real {name}").tokens.info.encodings


@REQUESTED
@given(text=texts)
def test_a_text_comes_back_from_its_ids(name: str, text: str) -> None:
    """Normalized, where the tokenizer normalizes: Qwen's composes characters."""
    assume(name not in LOST or not LOST[name].search(text))
    seen = observed(vendor(name).tokens, {"role": "user", "content": text}, [], RAW, ROOM)
    back = vendor(name).tokens.decode(seen.token_ids)
    assert back in {text, unicodedata.normalize("NFC", text)}
    assert vendor(name).text_of([*seen.token_ids]) == back


@REQUESTED
@given(text=texts, data=st.data())
def test_an_observation_cut_in_a_character_shows_what_its_ids_say(name: str, text: str, data: st.DataObject) -> None:
    assume(name not in LOST or not LOST[name].search(text))
    tokens, message = vendor(name).tokens, {"role": "user", "content": text}
    for options in (RAW, CHAT):
        whole = observed(tokens, message, [], options, ROOM)  # type: ignore[arg-type]
        room = data.draw(st.integers(0, max(len(whole.token_ids) - 1, 0)))
        cut = observed(tokens, message, [], options, room)  # type: ignore[arg-type]
        assert list(cut.token_ids) == list(whole.token_ids)[:room]
        assert text.startswith(cut.content) or text.strip().startswith(cut.content)
        if options is RAW and "\ufffd" not in text:
            shown, content = vendor(name).text_of([*cut.token_ids]), unicodedata.normalize("NFC", cut.content)
            said = unicodedata.normalize("NFC", shown.partition("\ufffd")[0])
            # Gemma's decoder shows no byte of a run of bytes that is not valid as a whole.
            assert content.startswith(said) if name == "real gemma3" and "\ufffd" in shown else content == said


@pytest.mark.parametrize("name", [name for name in wanted() if name == "mistral"])
def test_mistrals_own_file_is_refused_and_converted_as_the_refusal_says(name: str, tmp_path: Path) -> None:
    file = package_folder("mistral_common") / "data" / TEKKEN
    shutil.copy(file, tmp_path / "tekken.json")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(UnsupportedTokenizer, match=r"tekken\.json but no tokenizer\.json.*convert_tekken_tokenizer"):
        TransformersChatTokenizer.load(str(tmp_path))
    assert len(vendor(f"real {name}").hf) == Tekkenizer.from_file(file).n_words


@pytest.mark.parametrize("name", [name for name in wanted() if name == "mistral"])
def test_the_converted_file_makes_the_ids_of_mistrals_own_tokenizer(name: str) -> None:
    own, tokens = (
        Tekkenizer.from_file(package_folder("mistral_common") / "data" / TEKKEN),
        vendor(f"real {name}").tokens,
    )

    @given(text=texts)
    def check(text: str) -> None:
        seen = observed(tokens, {"role": "user", "content": text}, [], RAW, ROOM)
        assert list(seen.token_ids) == own.encode(text, bos=False, eos=False)

    check()
