"""Parses responses in worker processes, beside the event loop.

Child's half: `deployments/generation/response_parser.py`. Parsers are Python code over text that a model wrote: they
hold the interpreter's lock, and some take very long on text that they were not written for. A process can be ended,
whatever it does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from deployments.failures import EnvironmentLost
from deployments.generation.response_parser import PRELOADED, WHOLE_PROMPT, ParserChoice, parse_all, prepare
from deployments.generation.settings import ResponseSettings
from deployments.protocols.chat import ParsedResponse, ResponseParser, ResponseToParse
from deployments.rpc.batching import IterationBatcher
from deployments.workers.pool import ProcessorTimeExceeded, WorkerPool

START_WITHIN_S = 600.0
"""Importing vLLM takes ten seconds on a machine that does nothing else."""
LOST_AFTER_S = 60.0
MOST_PER_CALL = 64
"""Responses that travel together: one message costs as much as parsing several."""
Batch = Sequence[tuple[ResponseToParse, "asyncio.Future[ParsedResponse]"]]
ParseCall = Callable[[Sequence[ResponseToParse]], Awaitable[list[ParsedResponse]]]
"""Parses responses in a worker process that is free. Raises what `WorkerPool.run` raises."""


class ProcessResponseParser(ResponseParser):
    """Sends the responses that wait together, as soon as a worker process is free."""

    def __init__(
        self,
        call: ParseCall,
        processes: int,
        needs_prompt: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        processes: how many calls can run at once.
        needs_prompt: whether the parsers look at the tokens before a response.
        close: ends the processes.
        """
        self.close = close
        self._call = call
        self._free = processes
        self._needs_prompt = needs_prompt
        self._batcher = IterationBatcher(self._take)
        self._waiting: list[tuple[ResponseToParse, asyncio.Future[ParsedResponse]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls, settings: ResponseSettings, tokenizer: str, ends_of_turn: frozenset[int]
    ) -> "ProcessResponseParser | None":
        """Starts the worker processes and waits until they have the parsers; `None` if the settings name no parser.

        Raises:
            ParserUnusable: vLLM has no such parser, or it does not work with the tokenizer.
            EnvironmentLost: no worker process answers.
        """
        if not settings.has_parsers:
            return None
        choice = ParserChoice(tokenizer, settings.tool_call_parser, settings.reasoning_parser, ends_of_turn)
        pool = await WorkerPool.start(
            settings.parser_processes,
            partial(prepare, choice),
            PRELOADED,
            first_call=partial(parse_all, []),
            start_within_s=START_WITHIN_S,
            lost_after_s=max(LOST_AFTER_S, 4 * settings.parse_timeout_s),
        )
        needs_prompt = WHOLE_PROMPT in (settings.tool_call_parser, settings.reasoning_parser)

        async def call(responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
            return await pool.run(settings.parse_timeout_s, parse_all, responses)

        return cls(call, settings.parser_processes, needs_prompt, pool.close)

    async def parse(self, response: ResponseToParse) -> ParsedResponse:
        if not self._needs_prompt:
            response = replace(response, prompt_token_ids=())
        parsed: asyncio.Future[ParsedResponse] = asyncio.get_running_loop().create_future()
        self._batcher.add((response, parsed))
        return await parsed

    def _take(self, responses: Batch) -> None:
        self._waiting += responses
        self._send()

    def _send(self) -> None:
        """Gives each free worker process as many of the responses that wait as travel together."""
        while self._free and self._waiting:
            batch, self._waiting = self._waiting[:MOST_PER_CALL], self._waiting[MOST_PER_CALL:]
            wanted = [(response, parsed) for response, parsed in batch if not parsed.done()]
            if not wanted:
                continue
            self._free -= 1
            call = asyncio.create_task(self._parse(wanted))
            self._calls.add(call)
            call.add_done_callback(self._end)

    def _end(self, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        self._free += 1
        self._send()

    async def _parse(self, batch: Batch) -> None:
        """Parses the responses together; if that fails, one by one: only those that fail then have an error."""
        results = await self._results([response for response, _ in batch])
        for place, (response, parsed) in enumerate(batch):
            [result] = results[place : place + 1] or await self._results([response])
            if not parsed.done():
                parsed.set_result(result)

    async def _results(self, responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
        """One result for each response, or none at all if there are several and their call fails."""
        try:
            return await self._call(responses)
        except ProcessorTimeExceeded as error:
            reason = f"The parser needed {error}."
        except EnvironmentLost as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a parser does, its response is text at least
            reason = f"{type(error).__name__}: {error}"
        return [ParsedResponse(parse_error=reason)] if len(responses) == 1 else []
