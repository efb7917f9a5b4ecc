"""How long a step blocks the event loop, as opposed to how long it takes."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from rollout_env import check_rules
from rollout_env.check_rules import StepTooSlow, longest_block
from tests import virtual_time


async def blocks_twice() -> str:
    time.sleep(0.1)  # noqa: ASYNC251 - the fault under test
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - the fault under test
    return "done"


async def waits(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def raises() -> str:
    raise KeyError("board")


@pytest.mark.slow
def test_the_longest_block_of_a_step_is_measured() -> None:
    result, longest_s = asyncio.run(longest_block(blocks_twice(), timeout_s=60))
    assert result == "done"
    assert longest_s > 0.25


@virtual_time.test
async def test_a_step_that_waits_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_rules, "time", SimpleNamespace(monotonic=virtual_time.now))
    result, longest_s = await longest_block(waits(10.0), timeout_s=60)
    assert (result, round(longest_s, 9)) == ("done", 0.0)
    assert virtual_time.now() == pytest.approx(10.0, abs=check_rules.BEAT_S)


def test_a_step_that_takes_too_long_is_cancelled() -> None:
    async def ended() -> bool:
        step = asyncio.ensure_future(waits(60))
        with pytest.raises(StepTooSlow):
            await longest_block(step, timeout_s=0.05)
        await asyncio.sleep(0)
        return step.cancelled()

    assert asyncio.run(ended())


def test_what_a_step_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="board"):
        asyncio.run(longest_block(raises(), timeout_s=60))
