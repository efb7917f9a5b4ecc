"""How many engines share a card, and what of its memory each one has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

from deployments.generation import card_share
from deployments.generation.card_share import CardTooSmall, _engines_for, engines_on_a_card, with_share_of_card
from deployments.generation.settings import EngineSettings

GIB = 2**30
H100 = 80 * 1024
"""MiB, as `nvidia-smi` prints them."""


def engine(**fields: Any) -> EngineSettings:
    return EngineSettings.model_validate({"model": "org/model"} | fields)


def has_cards(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *mebibytes: int | str, cores: float = 16, mode: str = "Default"
) -> None:
    """A `nvidia-smi` that knows these cards, of which `--id` names one, and a machine of so many cores."""
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        + "".join(
            f'case "$*" in *--id=[!{place}]) ;; *) echo "{size}, {mode}";; esac\n'
            for place, size in enumerate(mebibytes)
        )
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(card_share, "resources_of_this_machine", lambda: {"CPU": cores})


def model_of(folder: Path, gibibytes: float, name: str = "model.safetensors") -> str:
    """A model whose weights have this size on paper."""
    with (folder / name).open("wb") as file:
        file.truncate(int(gibibytes * GIB))
    return str(folder)


@pytest.mark.parametrize(
    ("weights_gib", "card_gib", "cores", "engines"),
    [
        (0.9, 80, 16, 4),
        (0.9, 80, 64, 5),
        (0.9, 141, 64, 6),
        (0.9, 80, 7, 1),
        (0.9, 24, 16, 1),
        (2.9, 80, 16, 2),
        (14.2, 80, 64, 1),
        (14.2, 141, 64, 1),
    ],
)
def test_small_models_share_a_card(weights_gib: float, card_gib: int, cores: float, engines: int) -> None:
    assert _engines_for(int(weights_gib * GIB), int(0.9 * card_gib * GIB), cores) == engines


def test_auto_follows_the_smallest_card_and_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = engine(model=model_of(tmp_path, 0.9), engines_per_gpu="auto")
    has_cards(monkeypatch, tmp_path, H100)
    assert engines_on_a_card(small) == 4
    has_cards(monkeypatch, tmp_path, H100, H100)
    assert engines_on_a_card(small) == 2
    has_cards(monkeypatch, tmp_path, H100, 40 * 1024, cores=64)
    assert engines_on_a_card(small) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engines_on_a_card(small) == 5
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    has_cards(monkeypatch, tmp_path, H100, cores=64)
    assert engines_on_a_card(small.model_copy(update={"gpu_memory_utilization": 0.45})) == 2


@pytest.mark.parametrize(("memory", "mode"), [("[N/A]", "Default"), (H100, "Exclusive_Process")])
def test_auto_is_one_engine_on_a_card_that_cannot_be_shared(
    memory: int | str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_cards(monkeypatch, tmp_path, memory, mode=mode)
    assert engines_on_a_card(engine(model=model_of(tmp_path, 0.9), engines_per_gpu="auto")) == 1
    with pytest.raises(CardTooSmall, match="no card that can be shared is known here"):
        with_share_of_card(engine(model=str(tmp_path), engines_per_gpu=2))


@pytest.mark.parametrize("field", ["kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_offloading_size"])
def test_auto_is_one_engine_where_it_has_sizes(field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100)
    assert engines_on_a_card(engine(model=model_of(tmp_path, 0.9), engines_per_gpu="auto", **{field: 8})) == 1


@pytest.mark.parametrize(
    "fields", [{"device": "cpu"}, {"tensor_parallel_size": 2}, {"weight_transfer_config": {"backend": "nccl"}}]
)
def test_auto_is_one_where_none_share(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100)
    assert engines_on_a_card(engine(model=model_of(tmp_path, 0.9), engines_per_gpu="auto", **fields)) == 1
    with pytest.raises(ValueError, match="engines_per_gpu: 2 engines share a card only where"):
        engine(engines_per_gpu=2, **fields)


def test_auto_is_one_engine_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engines_on_a_card(engine(model=model_of(tmp_path, 0.9), engines_per_gpu="auto")) == 1
    has_cards(monkeypatch, tmp_path, H100)
    assert engines_on_a_card(engine(model="no model/at all", engines_per_gpu="auto")) == 1


def test_each_engine_has_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100)
    one = with_share_of_card(engine(model=model_of(tmp_path, 1), engines_per_gpu=4, gpu_memory_utilization=0.8))
    args = one.engine_args()
    assert args["gpu_memory_utilization"] == 0.2
    # 16 GiB, less one for the weights and four beside them; a tenth of the rest stays free.
    assert args["kv_cache_memory_bytes"] == int(0.9 * 11 * GIB)
    assert args["max_model_len"] == -1
    assert "engines_per_gpu" not in args
    assert one.ray_actor_options() == {"num_cpus": 1, "num_gpus": 0.25}


def test_one_engine_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100)
    large = engine(model=model_of(tmp_path, 14), engines_per_gpu="auto")
    assert with_share_of_card(large) == engine(model=str(tmp_path))


def test_a_cache_that_is_given_needs_no_card_to_look_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    args = with_share_of_card(engine(engines_per_gpu=3, kv_cache_memory_bytes=GIB, max_model_len=512)).engine_args()
    assert (args["gpu_memory_utilization"], args["kv_cache_memory_bytes"], args["max_model_len"]) == (0.9 / 3, GIB, 512)
    with pytest.raises(CardTooSmall, match="no card that can be shared is known here"):
        with_share_of_card(engine(engines_per_gpu=3))
    has_cards(monkeypatch, tmp_path, H100)
    with pytest.raises(CardTooSmall, match="no size of the weights of no model/at all is known"):
        with_share_of_card(engine(model="no model/at all", engines_per_gpu=3))


def test_engines_that_leave_no_cache_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100)
    with pytest.raises(CardTooSmall, match=r"4 engines have 18.0 GiB of a card each, of which weights take 14.0"):
        with_share_of_card(engine(model=model_of(tmp_path, 14), engines_per_gpu=4))


@pytest.mark.parametrize("engines", [1, 2, 3, 6, 7])
def test_the_engines_of_a_card_reserve_no_more_than_it(engines: int) -> None:
    reserved = engine(engines_per_gpu=engines).ray_actor_options()["num_gpus"]
    assert engines * reserved <= 1 < (engines + 1) * reserved
    assert round(reserved, 4) == reserved


def test_weights_are_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100, cores=64)
    model_of(tmp_path, 2.9, "pytorch_model.bin")
    assert engines_on_a_card(engine(model=str(tmp_path), engines_per_gpu="auto")) == 2
    model_of(tmp_path, 0.9, "model.safetensors")
    model_of(tmp_path, 9, "consolidated.safetensors")
    assert engines_on_a_card(engine(model=str(tmp_path), engines_per_gpu="auto")) == 5


def test_the_hub_tells_the_size_of_what_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_cards(monkeypatch, tmp_path, H100, cores=64)
    sizes = {"model.safetensors": 3 * GIB, "original/model.safetensors": 9 * GIB, "pytorch_model.bin": 9 * GIB}
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    elsewhere = engine(model="org/elsewhere", engines_per_gpu="auto")
    assert engines_on_a_card(elsewhere) == 2

    def unreachable(*_: Any, **__: Any) -> None:
        raise OfflineModeIsEnabled

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    assert engines_on_a_card(elsewhere) == 1
    cached = Path(model_of(tmp_path, 0.9)) / "config.json"
    monkeypatch.setattr(card_share, "try_to_load_from_cache", lambda *_, **__: str(cached))
    assert engines_on_a_card(elsewhere) == 5
