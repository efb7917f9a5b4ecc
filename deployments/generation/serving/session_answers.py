"""The answer to a call of a session: one that was planned with an outdated copy of the record is made once more."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import ASGIApp

from deployments.generation.serving.asgi_calls import answer_parts
from deployments.generation.serving.record_copies import RecordOutdated
from deployments.generation.serving.served_call import ServedCall
from deployments.generation.serving.session_call import SessionCall
from deployments.generation.serving.session_calls_in_flight import SessionCallsInFlight
from deployments.protocols.model_server import ServedPart, ServedRequest


async def session_answer_parts(
    app: ASGIApp, request: ServedRequest, session_id: str, calls: SessionCallsInFlight
) -> AsyncGenerator[ServedPart, None]:
    """As `answer_parts`. The second time there is no copy any longer, and the store makes the plan."""
    for is_second in (False, True):
        call = ServedCall(request)
        session = call.session = SessionCall(call, session_id, calls, is_made_again=is_second)
        try:
            async with aclosing(answer_parts(app, call)) as parts:
                async for part in parts:
                    yield part
            return
        except RecordOutdated:
            if is_second:
                raise
        except BaseException:
            session.give_up()
            raise
