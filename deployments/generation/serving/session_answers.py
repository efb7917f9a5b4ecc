"""The answer to a call of a session: one that was planned with an outdated copy of the record is made once more."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from starlette.types import ASGIApp

from deployments.generation.serving.asgi_calls import answer_parts
from deployments.generation.serving.served_call import ServedCall
from deployments.generation.serving.session_call import SessionCall
from deployments.generation.serving.session_calls_in_flight import RecordOutdated, SessionCallsInFlight
from deployments.serving_records import ServedPart, ServedRequest


async def session_answer_parts(
    app: ASGIApp, request: ServedRequest, session_id: str, calls: SessionCallsInFlight
) -> AsyncGenerator[ServedPart, None]:
    """As `answer_parts`. The second time there is no copy any longer, and the store makes the plan."""
    for _ in range(2):
        call = ServedCall(request)
        call.session = SessionCall(call, session_id, calls)
        with suppress(RecordOutdated):
            async with aclosing(answer_parts(app, call)) as parts:
                async for part in parts:
                    yield part
            return
