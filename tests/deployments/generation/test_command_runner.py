"""A replica's files of adapters: they stay as long as a generation may need them, and no longer."""

import asyncio
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from deployments.generation.command_runner import CommandRunner
from deployments.generation.engine import VLLMEngine
from deployments.policy.commands import LoadedWeights, NumberedCommand, ReplicaRegistration, Stage, VersionPayload


class AdapterEngine:
    """Generations use adapter 2 still, and 4 is the newest."""

    loaded = LoadedWeights(1, 4)
    adapters_in_use = frozenset({2, 4})

    async def stage_adapter(self, version: int, folder: Path) -> None:
        assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"


def test_staging_leaves_the_files_of_adapters_that_are_in_use(tmp_path: Path) -> None:
    for version in range(1, 5):
        (tmp_path / str(version)).mkdir()

    async def story() -> None:
        piece: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        piece.set_result(b"weights")
        engine, store = AdapterEngine(), object()
        follower = CommandRunner(
            engine,  # type: ignore[arg-type]
            store,  # type: ignore[arg-type]
            lambda loaded: ReplicaRegistration("a", None, 1, loaded),
            tmp_path,
        )
        report = await follower._report_of(NumberedCommand(1, Stage(VersionPayload(5, "adapter", (piece,), "{}"))))
        assert report.error is None

    asyncio.run(story())
    assert {folder.name for folder in tmp_path.iterdir()} == {"2", "4", "5"}


class DeadEngine(AdapterEngine):
    async def stage_adapter(self, version: int, folder: Path) -> None:
        raise RuntimeError(f"it died while {version} was loaded from {folder.name}")

    async def is_alive(self) -> bool:
        return False


def test_a_replica_whose_engine_died_says_that_it_is_broken_rather_than_that_the_weights_are(tmp_path: Path) -> None:
    async def story() -> None:
        engine, store = DeadEngine(), object()
        follower = CommandRunner(
            engine,  # type: ignore[arg-type]
            store,  # type: ignore[arg-type]
            lambda loaded: ReplicaRegistration("a", None, 1, loaded),
            tmp_path,
        )
        report = await follower._report_of(NumberedCommand(1, Stage(VersionPayload(5, "adapter", (), "{}"))))
        assert (report.error, report.broken) == ("RuntimeError: it died while 5 was loaded from 5", True)

    asyncio.run(story())


class SlowToUnload:
    def __init__(self) -> None:
        self.may_unload = asyncio.Event()
        self.unloaded: list[int] = []

    async def remove_lora(self, version: int) -> bool:
        await self.may_unload.wait()
        self.unloaded.append(version)
        return True


def test_an_adapter_is_in_use_until_the_engine_has_dropped_it() -> None:
    async def story() -> None:
        llm: Any = SlowToUnload()
        engine = VLLMEngine(llm)
        old, new = (LoRARequest(f"policy-{version}", version, "/") for version in (2, 3))
        engine._use_adapter(old)
        with engine._using(old):
            engine._use_adapter(new)
            assert engine.adapters_in_use == {2, 3}
        assert engine.adapters_in_use == {2, 3}
        llm.may_unload.set()
        await asyncio.gather(*engine._unloading)
        await asyncio.sleep(0)
        assert (engine.adapters_in_use, llm.unloaded) == ({3}, [2])

    asyncio.run(story())
