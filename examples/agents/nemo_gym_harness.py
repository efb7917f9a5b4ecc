"""An agent server of NeMo-Gym as the agent of a task. Runs with the packages of NeMo-Gym.

    python examples/agents/nemo_gym_harness.py --agent http://127.0.0.1:8101 --port 9100

The service posts each rollout to `/rollouts`, which has the agent server run its row and answers with its reward. The
model server of NeMo-Gym has `/v1` of this program as its `policy_base_url`: a call goes on to the session of its
rollout. Which one that is stands in the `metadata` of the row, which the agent server hands on with each call.
"""

from argparse import ArgumentParser
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel

RUN = "rollout_session"


class Rollout(BaseModel):
    base_url: str
    api_key: str
    sample: dict[str, Any]


def harness(agent: str) -> FastAPI:
    """Takes the address of the agent server."""
    app, http, running = FastAPI(), httpx.AsyncClient(timeout=None), dict[str, Rollout]()

    @app.post("/rollouts")
    async def play(rollout: Rollout) -> float:
        row: dict[str, Any] = rollout.sample["extra_env_info"]
        asked: dict[str, Any] = row["responses_create_params"]
        run = uuid4().hex
        running[run] = rollout
        try:
            marked = {**asked, "metadata": {**(asked.get("metadata") or {}), RUN: run}}
            answer = await http.post(f"{agent}/run", json={**row, "responses_create_params": marked})
        finally:
            del running[run]
        if answer.is_error:
            raise HTTPException(500, f"The agent server answered {answer.status_code}: {answer.text[-1000:]}")
        reward: float = answer.json()["reward"]
        return reward

    @app.post("/v1/responses")
    async def call(body: dict[str, Any]) -> Response:
        rollout = running.get(body.get("metadata", {}).pop(RUN, ""))
        if rollout is None:
            raise HTTPException(410, "The rollout of this call has ended.")
        key = {"authorization": f"Bearer {rollout.api_key}"}
        answer = await http.post(f"{rollout.base_url}/v1/responses", json=body, headers=key)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    return app


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--port", type=int, default=9100)
    given = parser.parse_args()
    uvicorn.run(harness(given.agent), port=given.port)
