"""`python -m service` with the embedded model: rollouts, groups, turns, a session, and plain chat calls."""

import time
from typing import Any

import httpx

from benchmarks.gpu_check.configs import Machine, running_service
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import distinct
from benchmarks.reference_model import token_ids_of
from rollout_client import RolloutClient, Sampling
from rollout_client.contract.rollouts import SampleResult
from service.startup.config import REPOSITORY

MODEL = REPOSITORY / "models" / "tiny"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


def check(machine: Machine, findings: Findings) -> None:
    served = machine.served(machine.engine(MODEL, max_model_len=2048), sessions={})
    with running_service(served, findings) as (url, client):
        check_rollouts(client, findings)
        check_calls(url, client, findings)


def check_rollouts(client: RolloutClient, findings: Findings) -> None:
    name = "a rollout, and again with the same seed"
    with findings.attempt(name):
        one = client.example_samples("math", 1, seed=1)
        first, second = (client.rollout(one, sampling=Sampling(seed=3, max_new_tokens=64)).samples[0] for _ in range(2))
        findings.add(name, token_ids_of(first) == token_ids_of(second), reward=first.total_reward, status=first.status)
    name = "a group of 64"
    with findings.attempt(name):
        began = time.monotonic()
        samples = client.example_samples("math", 1, seed=2)
        group = client.rollout(samples, num_generations=64, sampling=Sampling(max_new_tokens=64)).samples
        findings.add(
            name,
            len(group) == 64 and all(sample.status != "error" for sample in group),
            distinct=distinct(group),
            mean_reward=sum(sample.total_reward or 0 for sample in group) / 64,
            seconds=round(time.monotonic() - began, 2),
        )
    name = "games of several turns"
    with findings.attempt(name):
        games = client.rollout(
            client.example_samples("sliding_puzzle", 64),
            sampling=Sampling(temperature=1.5, max_new_tokens=48),
            max_rollout_turns=6,
        ).samples
        turns = [sum(message.role == "assistant" for message in game.message_log) for game in games]
        findings.add(name, all(map(has_logprobs, games)) and max(turns) == 6, turns=sorted(set(turns)))


def has_logprobs(sample: SampleResult) -> bool:
    """Whether each token that was generated has one."""
    spoken = [message for message in sample.message_log if message.role == "assistant"]
    return all(len(message.token_ids) == len(message.generation_logprobs or []) > 0 for message in spoken)


def check_calls(url: str, client: RolloutClient, findings: Findings) -> None:
    plain: dict[str, Any] = {"model": "rollout", "messages": QUESTION, "max_tokens": 24}
    with httpx.Client(timeout=60) as http:
        model = http.get(f"{url}/v1/models").json()["data"][0]["id"]
        calls: dict[str, dict[str, Any]] = {
            "a chat call": {},
            "a chat call with top_p 0.8": {"top_p": 0.8},
            "a chat call with top_p, top_k and min_p": {"top_p": 0.8, "top_k": 20, "min_p": 0.05},
            "a chat call with a repetition penalty": {"repetition_penalty": 1.2},
            "a chat call with a JSON schema": {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "answer",
                        "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
                    },
                }
            },
        }
        for name, added in calls.items():
            with findings.attempt(name):
                answer = http.post(f"{url}/v1/chat/completions", json=plain | {"model": model} | added)
                findings.add(name, answer.is_success, status=answer.status_code, answer=answer.text[:200])
        name = "a session of two calls"
        with findings.attempt(name), client.sessions.open() as session:
            key = {"authorization": f"Bearer {session.api_key}"}
            history: list[dict[str, Any]] = [*QUESTION]
            for _ in range(2):
                body = plain | {"model": model, "messages": history}
                answer = http.post(f"{session.base_url}/chat/completions", json=body, headers=key).raise_for_status()
                history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And 4 + 4?"}]
            session.reward(1.0)
            [sample] = session.samples()
            spoken = [message for message in sample.message_log if message.role == "assistant"]
            findings.add(name, len(spoken) == 2 and has_logprobs(sample), messages=len(sample.message_log))
