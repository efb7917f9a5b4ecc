"""The pool of sandboxes, over a provider that counts."""

import asyncio
from typing import Any

import pytest

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import ExecResult, SandboxRefused, SandboxSpec
from deployments.sandbox.providers.pool import REAP_EVERY_S, SandboxPool
from tests import virtual_time

CREATE_S = 1.0


class Sandbox:
    def __init__(self, provider: "Counting", image: str) -> None:
        self.provider, self.image, self.lost = provider, image, False

    async def exec(self, argv: list[str]) -> ExecResult:
        if self.lost:
            raise SandboxLost("It has ended.")
        return ExecResult(0, "", "")

    async def close(self) -> None:
        await asyncio.sleep(0.1)
        self.provider.living.remove(self)


class Counting:
    def __init__(self) -> None:
        self.living: list[Sandbox] = []
        self.most = self.created = self.reaped = 0
        self.refuses = False

    async def open(self, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(CREATE_S)
        if self.refuses:
            raise SandboxRefused("no")
        self.living.append(Sandbox(self, str(spec.image)))
        self.created += 1
        self.most = max(self.most, len(self.living))
        return self.living[-1]

    async def reap(self) -> int:
        self.reaped += 1
        return 0

    def close(self) -> None:
        self.living.clear()


def pool_of(most: int, **options: Any) -> tuple[SandboxPool, Counting]:
    provider: Any = Counting()
    return SandboxPool(provider, most, **options), provider


def spec(image: str = "a") -> SandboxSpec:
    return SandboxSpec(image=image)


def test_not_more_than_the_permitted_number_exist_at_once() -> None:
    async def run() -> Counting:
        pool, provider = pool_of(3)

        async def use() -> None:
            sandbox = await pool.take(spec())
            await asyncio.sleep(1)
            await pool.give_back(sandbox)

        await asyncio.gather(*(use() for _ in range(10)))
        assert provider.living == []
        return provider

    provider = virtual_time.run(run())
    assert (provider.created, provider.most) == (10, 3)


def test_warm_ones_are_ready_at_once_and_those_that_nobody_takes_are_destroyed() -> None:
    async def run() -> tuple[float, int, int]:
        pool, provider = pool_of(4, warm=2, warm_s=30)
        first = await pool.take(spec())
        await asyncio.sleep(2)
        begun_at = virtual_time.now()
        second = await pool.take(spec())
        waited = virtual_time.now() - begun_at
        warm = len(provider.living)
        for sandbox in (first, second):
            await pool.give_back(sandbox)
        await asyncio.sleep(60)
        return waited, warm, len(provider.living)

    assert virtual_time.run(run()) == (0.0, 3, 0)


def test_a_warm_one_that_has_ended_or_is_of_another_kind_is_not_given_out() -> None:
    async def run() -> None:
        pool, provider = pool_of(4, warm=1)
        await pool.take(spec())
        await asyncio.sleep(2)
        provider.living[-1].lost = True
        assert not (await pool.take(spec())).lost  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        assert (await pool.take(spec("b"))).image == "b"  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        assert [sandbox.image for sandbox in provider.living] == ["a", "a", "b", "b"]

    virtual_time.run(run())


def test_a_place_is_free_again_when_a_sandbox_is_refused_or_nobody_waits_for_it() -> None:
    async def run() -> None:
        pool, provider = pool_of(1)
        provider.refuses = True
        with pytest.raises(SandboxRefused):
            await pool.take(spec())
        provider.refuses = False
        taking = asyncio.ensure_future(pool.take(spec()))
        await asyncio.sleep(CREATE_S / 2)
        taking.cancel()
        await asyncio.wait([taking])
        await pool.give_back(await pool.take(spec()))
        assert provider.created == 1

    virtual_time.run(run())


def test_a_sandbox_is_destroyed_to_the_end_also_by_a_caller_who_is_cancelled() -> None:
    async def run() -> None:
        pool, provider = pool_of(1)
        giving = asyncio.ensure_future(pool.give_back(await pool.take(spec())))
        await asyncio.sleep(0.05)
        giving.cancel()
        await asyncio.sleep(1)
        assert provider.living == []
        await pool.take(spec())

    virtual_time.run(run())


def test_what_dead_owners_left_is_looked_for_while_the_pool_lives() -> None:
    async def run() -> int:
        pool, provider = pool_of(1)
        await pool.take(spec())
        await asyncio.sleep(10 * REAP_EVERY_S)
        pool.close()
        return provider.reaped

    assert virtual_time.run(run()) == 11
