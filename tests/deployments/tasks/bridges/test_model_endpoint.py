"""The endpoint through which an environment that drives its own episode asks the policy."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx

from deployments.tasks.bridges.model_endpoint import EndpointSession, ModelEndpoint, new_messages

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Q"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def ask_in(story: Callable[[EndpointSession, Callable[..., Awaitable[httpx.Response]]], Awaitable[None]]) -> None:
    """Runs the story with a session, and with what posts a request to it."""

    async def run() -> None:
        endpoint = ModelEndpoint()
        transport = httpx.ASGITransport(app=endpoint.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            with endpoint.session() as session:

                async def post(**fields: bool) -> httpx.Response:
                    return await client.post(f"{session.url}/chat/completions", json={**BODY, **fields})

                await story(session, post)
            # The session is closed: what is still asked is answered now.
            assert (await post()).status_code == 410

    asyncio.run(asyncio.wait_for(run(), 40))


def test_a_request_is_answered_by_the_reply_that_its_session_gives() -> None:
    async def story(session: EndpointSession, post: Callable[..., Awaitable[httpx.Response]]) -> None:
        asked = asyncio.ensure_future(post())
        assert (await session.next_request())["messages"] == BODY["messages"]
        could_be_answered = session.can_be_answered
        session.answer({"role": "assistant", "content": "<call>", "parsed_content": "", "tool_calls": [CALL]})
        [choice] = (await asked).json()["choices"]
        assert (could_be_answered, session.can_be_answered) == (True, False)
        message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        assert choice == {"index": 0, "finish_reason": "tool_calls", "message": message}

    ask_in(story)


def test_an_answer_can_be_streamed_in_one_piece() -> None:
    async def story(session: EndpointSession, post: Callable[..., Awaitable[httpx.Response]]) -> None:
        asked = asyncio.ensure_future(post(stream=True))
        await session.next_request()
        session.answer({"role": "assistant", "content": "4"})
        *chunks, done, _ = (await asked).text.split("\n\n")
        [delta, end] = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        assert delta["delta"] == {"role": "assistant", "content": "4"}
        assert (end["finish_reason"], done) == ("stop", "data: [DONE]")

    ask_in(story)


def test_every_request_of_a_session_is_refused_when_it_is_closed_also_those_that_wait_for_their_turn() -> None:
    asked: list[asyncio.Future[httpx.Response]] = []

    async def story(session: EndpointSession, post: Callable[..., Awaitable[httpx.Response]]) -> None:
        asked.extend(asyncio.ensure_future(post()) for _ in range(3))
        await session.next_request()
        while len(session._unanswered) < 3:
            await asyncio.sleep(0)
        session.close()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [410, 410, 410]
        assert answers[2].json() == {"error": {"message": "The episode was cut off."}}

    ask_in(story)


def test_the_messages_after_the_last_response_are_new() -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "Q"}]}
    answer = {"role": "assistant", "content": "A"}
    tool = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}
    assert new_messages([first]) == [{"role": "user", "content": "Q"}]
    assert new_messages([first, answer, tool]) == [tool]
