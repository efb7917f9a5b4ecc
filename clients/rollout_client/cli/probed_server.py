"""A rollout server of any kind, asked by vLLM's `/inference/v1/generate` or SGLang's `/generate`, whichever it has."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

PROMPT = tuple(range(20, 36))
TOKENS = 16
LIKELIEST = 20


class NotOffered(ValueError):
    """The server does not have what the check needs; the message says what."""


class Refused(ValueError):
    """The server answered with an error."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"{answer.status_code}: {answer.text[:200]}")
        self.status = answer.status_code


@dataclass(frozen=True, slots=True)
class ProbedGeneration:
    """One generation, as both APIs tell it: ids and log-probabilities [tokens], in nats."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[str, int, int]]
    """Version, first token, and the one after the last."""
    prompt: list[dict[int, float] | None]
    """Log-probabilities of the prompt's tokens and their likeliest alternatives, where they were asked for."""


class ProbedServer:
    """One server, by the API that it has."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._is_sglang = False
        self.longest: int | None = None
        """Tokens of a prompt with its generation, where the server says it."""
        self.model: str | None = None

    async def meet(self) -> None:
        """Raises `NotOffered` if it has neither API."""
        with suppress(NotOffered, KeyError, IndexError, TypeError):
            [model, *_] = (await self.get("/v1/models"))["data"]
            self.model, self.longest = model["id"], model.get("max_model_len")
        refusals = []
        for self._is_sglang in (False, True):
            try:
                await self.generate(tokens=1)
            except (NotOffered, Refused, KeyError, IndexError, TypeError) as refusal:
                refusals.append(repr(refusal))
            else:
                return
        raise NotOffered(f"it answers neither /inference/v1/generate nor /generate: {'; '.join(refusals)}")

    async def get(self, path: str) -> Any:
        """Raises `NotOffered` unless it answers with JSON."""
        answer = await self.http.get(path)
        try:
            return answer.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise NotOffered(f"GET {path} does not answer") from error

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> Any:
        """Raises `NotOffered` if there is no such route, and `Refused`."""
        answer = await self.http.post(path, json=body, headers=headers)
        is_missing = answer.status_code == HTTPStatus.NOT_FOUND and "model" not in answer.text
        if is_missing or answer.status_code in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
            raise NotOffered(f"POST {path} answers {answer.status_code}")
        if answer.is_error:
            raise Refused(answer)
        return answer.json()

    async def generate(
        self,
        prompt: Sequence[int] = PROMPT,
        tokens: int = TOKENS,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
        ignore_eos: bool = True,
        scores: bool = False,
        **fields: Any,
    ) -> ProbedGeneration:
        """`scores` asks for log-probabilities of the prompt too; `fields` are further ones of the body."""
        sampling: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos, "stop_token_ids": list(stop)}
        if self._is_sglang:
            sampling |= {"max_new_tokens": tokens, "sampling_seed": 7}
            start = {"logprob_start_len": 0, "top_logprobs_num": LIKELIEST} if scores else {}
            body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **start, **fields}
            return _of_sglang(await self.post("/generate", body))
        sampling |= {"max_tokens": tokens, "seed": 7, "logprobs": 0}
        if scores:
            sampling["prompt_logprobs"] = LIKELIEST
        body = {"model": self.model, "token_ids": list(prompt), "sampling_params": sampling, **fields}
        return _of_vllm(await self.post("/inference/v1/generate", body))

    async def running(self) -> int:
        """How many generations run. Raises `NotOffered`."""
        with suppress(NotOffered, KeyError, TypeError):
            return sum(load["num_running_reqs"] for load in (await self.get("/loads"))["loads"])
        answer = await self.http.get("/metrics")
        found = re.findall(r"^(?:vllm|sglang):num_(?:requests_running|running_reqs)(?:\{.*})? (\S+)", answer.text, re.M)
        if not found:
            raise NotOffered("neither /loads nor /metrics says how many generations run")
        return int(sum(map(float, found)))


def _of_vllm(answer: Any) -> ProbedGeneration:
    [choice] = answer["choices"]
    content = (choice["logprobs"] or {}).get("content") or []
    prompt = answer.get("prompt_logprobs") or []
    return ProbedGeneration(
        choice["token_ids"],
        [one["logprob"] for one in content],
        str(choice["finish_reason"]),
        [(str(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or ()],
        [at and {int(token): one["logprob"] for token, one in at.items()} for at in prompt],
    )


def _of_sglang(answer: Any) -> ProbedGeneration:
    about = answer["meta_info"]
    ids, spans = answer["output_ids"], about.get("weight_versions") or []
    if not spans and (version := about.get("weight_version")) is not None:
        spans = [{"version": version, "start": 0, "end": len(ids)}]
    scored = about.get("input_token_logprobs") or []
    likeliest = about.get("input_top_logprobs") or [None] * len(scored)
    return ProbedGeneration(
        ids,
        [logprob for logprob, *_ in about["output_token_logprobs"]],
        str(about["finish_reason"]["type"]),
        [(str(span["version"]), span["start"], span["end"]) for span in spans],
        [
            None if logprob is None else {token: logprob} | {other: said for said, other, *_ in others or ()}
            for (logprob, token, *_), others in zip(scored, likeliest, strict=True)
        ],
    )
