"""A stand-in for a resources server of NeMo-Gym, whose package needs a newer Python than the service.

It is the example `example_session_state_mgmt` (NeMo-Gym 07d6b0d), with the same routes, sessions by a signed cookie,
and the same types of OpenAI's package for the response that is verified.
"""

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, Request
from openai.types.responses import Response
from openai.types.responses.response_input_item import FunctionCallOutput
from openai.types.responses.response_output_item import ResponseOutputItem
from pydantic import BaseModel, ConfigDict
from starlette.middleware.sessions import SessionMiddleware

app = FastAPI()
counters: dict[str, int] = {}


class VerifiedResponse(Response):
    output: list[ResponseOutputItem | FunctionCallOutput]  # type: ignore[assignment]


class SeedRequest(BaseModel):
    initial_count: int


class IncrementRequest(BaseModel):
    count: int


class VerifyRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    response: VerifiedResponse
    expected_count: int


def session_of(request: Request) -> str:
    session: str = request.session.setdefault("session_id", str(uuid4()))
    return session


@app.post("/seed_session")
async def seed_session(request: Request, body: SeedRequest) -> dict[str, Any]:
    counters.setdefault(session_of(request), body.initial_count)
    return {}


@app.post("/increment_counter")
async def increment_counter(request: Request, body: IncrementRequest) -> dict[str, bool]:
    counters[session_of(request)] = counters.get(session_of(request), 0) + body.count
    return {"success": True}


@app.post("/get_counter_value")
async def get_counter_value(request: Request) -> dict[str, int]:
    return {"count": counters.setdefault(session_of(request), 0)}


@app.post("/verify")
async def verify(request: Request, body: VerifyRequest) -> dict[str, Any]:
    """Gives also back what it verified: the types of the items."""
    items = [item.type for item in body.response.output]
    reward = float(counters.get(session_of(request)) == body.expected_count)
    return {**body.model_dump(mode="json"), "reward": reward, "items": items}


app.add_middleware(SessionMiddleware, secret_key="stand-in", session_cookie="stand-in")

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
