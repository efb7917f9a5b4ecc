"""Which responses travel together to the parsers' processes, and what a call that fails costs."""

import asyncio
from collections.abc import Sequence

import pytest

from deployments.protocols.chat import ParsedResponse, ResponseToParse
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded
from service.remote.response_parser import MOST_PER_CALL, ProcessResponseParser
from tests import virtual_time

BAD = 13


class ScriptedWorkers:
    """Each call waits for the test. One with the token `BAD` raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[ResponseToParse]] = []
        self._error = error
        self._go_on = asyncio.Semaphore(0)

    async def parse(self, responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
        self.calls.append(list(responses))
        await self._go_on.acquire()
        if self._error is not None and any(BAD in response.token_ids for response in responses):
            raise self._error
        return [ParsedResponse(reasoning_content=str(list(response.token_ids))) for response in responses]

    def let_end(self, calls: int = 1000) -> None:
        for _ in range(calls):
            self._go_on.release()

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]


def started(parser: ProcessResponseParser, token_ids: Sequence[int]) -> "list[asyncio.Task[ParsedResponse]]":
    responses = [ResponseToParse([token_id], (7, 8)) for token_id in token_ids]
    return [asyncio.create_task(parser.parse(response)) for response in responses]


@pytest.mark.parametrize(("needs_prompt", "prompt"), [(False, ()), (True, (7, 8))])
async def test_responses_of_one_iteration_travel_together(needs_prompt: bool, prompt: tuple[int, ...]) -> None:
    workers = ScriptedWorkers()
    workers.let_end()
    tasks = started(ProcessResponseParser(workers.parse, 1, needs_prompt=needs_prompt), [1, 2, 3])
    assert [parsed.reasoning_content for parsed in await asyncio.gather(*tasks)] == ["[1]", "[2]", "[3]"]
    assert workers.sizes == [3]
    assert [response.prompt_token_ids for response in workers.calls[0]] == [prompt] * 3


async def test_what_comes_while_all_processes_work_goes_together() -> None:
    workers = ScriptedWorkers()
    parser = ProcessResponseParser(workers.parse, 2)
    tasks = []
    for token_id in (1, 2, 3, 4):
        tasks += started(parser, [token_id])
        await virtual_time.settled()
    assert workers.sizes == [1, 1]
    workers.let_end(1)
    await virtual_time.settled()
    assert workers.sizes == [1, 1, 2]
    workers.let_end()
    await asyncio.gather(*tasks)


async def test_a_call_carries_a_bounded_number_of_responses() -> None:
    workers = ScriptedWorkers()
    workers.let_end()
    await asyncio.gather(*started(ProcessResponseParser(workers.parse, 1), range(100, 101 + MOST_PER_CALL)))
    assert workers.sizes == [MOST_PER_CALL, 1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ProcessorTimeExceeded("more than 2 s"), "The parser needed more than 2 s."),
        (TemporaryFailure("A worker process ended with exit code 1."), "A worker process ended with exit code 1."),
        (MemoryError("none"), "MemoryError: none"),
    ],
)
async def test_a_response_that_breaks_its_process_costs_no_other_its_result(error: Exception, says: str) -> None:
    workers = ScriptedWorkers(error)
    workers.let_end()
    parser = ProcessResponseParser(workers.parse, 1)
    first, bad, last = await asyncio.gather(*started(parser, [1, BAD, 3]))
    assert (first.reasoning_content, last.reasoning_content) == ("[1]", "[3]")
    assert bad == ParsedResponse(parse_error=says)
    [later] = await asyncio.gather(*started(parser, [4]))
    assert later.reasoning_content == "[4]"


async def test_a_response_that_nobody_waits_for_any_longer_is_not_sent() -> None:
    workers = ScriptedWorkers()
    parser = ProcessResponseParser(workers.parse, 1)
    [running] = started(parser, [1])
    await virtual_time.settled()
    cancelled, waiting = started(parser, [2, 3])
    await virtual_time.settled()
    cancelled.cancel()
    await virtual_time.settled()
    workers.let_end()
    assert (await waiting).reasoning_content == "[3]"
    assert [[list(response.token_ids) for response in call] for call in workers.calls] == [[[1]], [[3]]]
    await running
