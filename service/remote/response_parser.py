"""Parses responses in worker processes, beside the event loop.

Child's half: `deployments/generation/response_parser.py`. Parsers are Python code over text that a model wrote: they
hold the interpreter's lock, and some take very long on text that they were not written for. A process can be ended,
whatever it does.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from deployments.generation.response_parser import PRELOADED, WHOLE_PROMPT, ParserChoice, parse_all, prepare
from deployments.generation.settings import ResponseSettings
from deployments.protocols.chat import FROM_MAIN, FromHub, ParsedResponse, ResponseParser, ResponseToParse
from deployments.rpc.batching import CallBatcher, at_once
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerPool

START_WITHIN_S = 600.0
"""Importing vLLM takes ten seconds on an idle machine."""
LOST_AFTER_S = 60.0
MOST_PER_CALL = 64
"""Responses that travel together: one message costs as much as parsing several."""
ParseCall = Callable[[Sequence[ResponseToParse]], Awaitable[list[ParsedResponse]]]
"""Parses responses in a worker process that is free. Raises what `WorkerPool.run` raises."""


class ProcessResponseParser(ResponseParser):
    """Sends the waiting responses together, as soon as a worker process is free."""

    def __init__(
        self, call: ParseCall, processes: int, needs_prompt: bool = False, close: Callable[[], None] = lambda: None
    ) -> None:
        """Makes no call yet.

        Args:
            processes: the number of calls that can run at once.
            needs_prompt: whether the parsers look at the tokens before a response.
            close: ends the processes.
        """
        self.close = close
        self._call = call
        self._needs_prompt = needs_prompt
        self._batcher: CallBatcher[ResponseToParse, ParsedResponse] = CallBatcher(
            at_once(self._parse), most_items=MOST_PER_CALL, most_calls=processes
        )

    @classmethod
    async def start(
        cls, settings: ResponseSettings, tokenizer: str, ends_of_turn: frozenset[int], hub: FromHub = FROM_MAIN
    ) -> "ProcessResponseParser | None":
        """Starts the worker processes and waits until they have the parsers; `None` if the settings name no parser.

        Raises:
            ParserUnusable: vLLM has no such parser, or it does not work with the tokenizer.
            TemporaryFailure: no worker process answers.
        """
        if not settings.has_parsers:
            return None
        choice = ParserChoice(tokenizer, settings.tool_call_parser, settings.reasoning_parser, ends_of_turn, hub)
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
        return await self._batcher.call(response if self._needs_prompt else replace(response, prompt_token_ids=()))

    async def _parse(self, responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
        """Parses the responses together; if that fails, one by one: only those that fail then have an error."""
        results = await self._results(responses)
        return results or [result for response in responses for result in await self._results([response])]

    async def _results(self, responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
        """One result for each response, or none at all if there are several and their call fails."""
        try:
            return await self._call(responses)
        except ProcessorTimeExceeded as error:
            reason = f"The parser needed {error}."
        except TemporaryFailure as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a parser does, its response is text at least
            reason = f"{type(error).__name__}: {error}"
        return [ParsedResponse(parse_error=reason)] if len(responses) == 1 else []
