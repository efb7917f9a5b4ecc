"""What comes in one event-loop iteration is handed over together."""

import asyncio

from deployments.rpc.batching import IterationBatcher


def test_the_items_of_one_iteration_are_handed_over_together_and_those_of_the_next_one_anew() -> None:
    batches: list[list[int]] = []

    async def story() -> None:
        batcher = IterationBatcher[int](batches.append)
        batcher.add(1)
        batcher.add(2)
        assert batches == []
        await asyncio.sleep(0)
        assert batches == [[1, 2]]
        batcher.add(3)
        await asyncio.sleep(0)

    asyncio.run(story())
    assert batches == [[1, 2], [3]]


def test_what_is_added_while_a_batch_is_handed_over_is_in_the_next_one() -> None:
    batches: list[list[int]] = []

    def send(items: list[int]) -> None:
        batches.append(items)
        if len(batches) == 1:
            batcher.add(2)

    async def story() -> None:
        batcher.add(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    batcher = IterationBatcher(send)
    asyncio.run(story())
    assert batches == [[1], [2]]
