"""A rollout server with a model of 64 tokens, which does what `rollout conformance` demands but for one fault."""

import asyncio
from collections.abc import Awaitable, Callable
from math import exp, log
from random import Random
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

TOKENS = 64
MAX_MODEL_LEN = 200
STEP_S = 0.004


def scores(context: list[int], temperature: float = 1.0) -> list[float]:
    """The log-probability of each next token, which the last two decide."""
    draw = Random(str(context[-2:]))
    logits = [draw.gauss(0, 2) / temperature for _ in range(TOKENS)]
    total = log(sum(map(exp, logits)))
    return [logit - total for logit in logits]


def in_loop(answer: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    """The route in the event loop: time would go on beside one that FastAPI lets a thread of its own answer."""

    async def answered() -> Any:
        return answer()

    return answered


class ConformingServer:
    """`fault` names one of the deviations below, `is_sglang` has it speak SGLang's API in place of vLLM's."""

    def __init__(self, fault: str = "", is_sglang: bool = False) -> None:
        self.fault, self.is_sglang = fault, is_sglang
        self.version, self.running, self.played = 3, 0, dict[str, Any]()
        self.app = FastAPI()
        posted: dict[str, Any] = {"/update_weights": self.update_weights, "/v1/rollout": self.rollout}
        for path, answer in {**posted, "/generate" if is_sglang else "/inference/v1/generate": self.generate}.items():
            self.app.add_api_route(path, answer, methods=["POST"])
        answered: dict[str, Any] = {
            "/v1/models": lambda: {"data": [{"id": "m", "max_model_len": MAX_MODEL_LEN}]},
            "/v1/tasks": lambda: {"tasks": [{"example": {"task_name": "sums"}}]},
            "/loads": lambda: {"loads": [{"num_running_reqs": self.running}]},
        }
        for path, answer in answered.items():
            self.app.add_api_route(path, in_loop(answer))

    async def update_weights(self) -> Any:
        self.version += 1
        return JSONResponse({}, 400 if self.fault == "takes no checkpoint" else 200)

    async def rollout(self, request: Request) -> Any:
        key = request.headers["idempotency-key"]
        if key not in self.played or self.fault == "plays again":
            ids = Random(f"{key} {len(self.played)}").choices(range(TOKENS), k=16)
            log_of = [{"token_ids": ids, "generation_logprobs": [-1.0] * 16}]
            self.played[key] = {"samples": [{"status": "completed", "error": None, "message_log": log_of}]}
            self.played[str(len(self.played))] = None
        return self.played[key]

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        sampling, prompt = body["sampling_params"], body["input_ids" if self.is_sglang else "token_ids"]
        tokens = sampling["max_new_tokens" if self.is_sglang else "max_tokens"]
        asked = body.get("weight_version") or {}
        if min(prompt) < 0 or len(prompt) + tokens > MAX_MODEL_LEN:
            if self.fault != "answers too long":
                return JSONResponse({"error": "no"}, 400)
            tokens = 0
        demanded = asked.get("exact_version", asked.get("min_version", 0))
        ignored = {"older for newer": "min_version", "other for exact": "exact_version"}.get(self.fault)
        if demanded > self.version and ignored not in asked:
            return JSONResponse({"error": "not yet"}, 400 if self.fault == "refuses for good" else 409)
        self.running += 1
        making = asyncio.create_task(self.made(prompt, tokens, sampling))
        try:
            while not making.done() and not await request.is_disconnected():
                await asyncio.wait([making], timeout=0.02)
        finally:
            if making.done() or self.fault != "runs on":
                making.cancel()
                self.running -= 1
        ids, said, reason, spans = await making
        scored = [None, *(scores(prompt[:place]) for place in range(1, len(prompt)))]
        if self.is_sglang:
            about: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_versions": spans}
            about["output_token_logprobs"] = list(zip(said, ids, ids, strict=True))
            said_of = [at and at[token] for at, token in zip(scored, prompt, strict=True)]
            about["input_token_logprobs"] = list(zip(said_of, prompt, prompt, strict=True))
            about["input_top_logprobs"] = [at and [(one, token, "") for token, one in enumerate(at)] for at in scored]
            return JSONResponse({"output_ids": ids, "meta_info": about})
        content = [{"token_id": token, "logprob": one} for token, one in zip(ids, said, strict=True)]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
        named = [at and {token: {"logprob": one} for token, one in enumerate(at)} for at in scored]
        return JSONResponse({"choices": [choice], "prompt_logprobs": named})

    async def made(self, prompt: list[int], tokens: int, sampling: Any) -> Any:
        """Ids, log-probabilities, the reason of the end, and which versions made which tokens."""
        temperature, draw = sampling["temperature"], Random(7)
        context, said, versions, reason = list(prompt), list[float](), list[int](), "length"
        if self.fault == "tokenizes again" and len(prompt) > 20:
            context[-1] = (context[-1] + 7) % TOKENS
        if self.fault == "mixes up answers" and self.running > 8:
            tokens += 1
        for _ in range(tokens - (self.fault == "drops a token")):
            await asyncio.sleep(STEP_S if tokens > 100 else 0)
            at = scores(context, temperature or 1.0)
            token = draw.choices(range(TOKENS), [*map(exp, at)])[0] if temperature else at.index(max(at))
            shown = scores(context)[token] if self.fault == "raw at a temperature" else at[token]
            said.append(0.0 if self.fault == "greedy is certain" and not temperature else shown)
            context.append(token)
            versions.append(self.version)
            if token in sampling["stop_token_ids"] and self.fault != "ignores stops":
                reason = "length" if self.fault == "calls a stop length" else "stop"
                break
        starts = [place for place, one in enumerate(versions) if place == 0 or one != versions[place - 1]]
        starts = starts[:1] if self.fault == "says the first version" else starts
        ends = [*starts[1:], len(versions) - (self.fault == "leaves tokens without version")]
        spans = [{"version": str(versions[at]), "start": at, "end": end} for at, end in zip(starts, ends, strict=False)]
        return context[len(prompt) :], said, reason, [] if self.fault == "says no version" else spans
