"""The cost of a large response as JSON and as Arrow: `python -m benchmarks payload`.

The real HTTP face, in a process of its own, answers over a socket of loopback with 2,000 rollouts that have ended: four
turns of 500 tokens each, a byte of text a token as the embedded model has it. Rounds alternate. What is measured is the
time from the last token at the server to padded tensors in the trainer, by one clock for both processes. Each rollout
is encoded as it ends, so at the last token all others have been; `at once` is the time where all end at the same
instant and nothing has been. The last line is JSON.
"""

import json
import multiprocessing
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import httpx
import numpy as np
import typer
import uvicorn
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.process_group import no_process_left
from deployments.protocols.chat import ChatOptions, ChatTokenizer, TokenizedObservation
from deployments.protocols.generation import Generation, SamplingOptions, WeightSpan, packed_ids, packed_logprobs
from rollout_client import RolloutClient
from rollout_client.arrow.schema import ARROW
from rollout_client.contract.info import DegradedPart
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import (
    PolicyVersions,
    RequestMetrics,
    RolloutRequest,
    RolloutSummary,
    SampleResult,
)
from rollout_client.tensors import to_tensors
from rollout_env import ChatMessage, StepOutcome
from service.access.access_control import OPEN_TO_ALL
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.remote.policy import RemotePolicy
from service.rollout_requests.result_encoding import JSON
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.running_rollout import EndedRollout, RunningRollout
from service.rollout_requests.service_status import Readiness
from service.rollout_requests.task_samples import TaskSampler
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart, Prompt
from service.rollouts.loop import RolloutContext
from service.rollouts.pacing import Schedule
from service.rollouts.progress import ProgressLog
from service.routes.http_app import build_http_app
from service.services import AppServices
from service.settings import AdmissionSettings, RequestLimits
from service.startup.config import free_port

GROUPS, GENERATIONS, TURNS, TOKENS_A_TURN = 250, 8, 4, 500
TOKENS = GROUPS * GENERATIONS * TURNS * TOKENS_A_TURN
VOCABULARY = """
    the of and to in is we have so first then let me compute check that sum carry digit ten one two three add subtract
    equals answer therefore wait because number both sides gives remainder divide multiply step result again
"""
SAMPLES = [{"task_name": "math", "messages": [{"role": "user", "content": "?"}]}] * GROUPS
console = Console(stderr=True)


class ByteChatTokenizer(ChatTokenizer):
    """One token a byte."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(list(token_ids)).decode()

    def pieces(
        self,
        token_ids: Sequence[int],
        before: Sequence[int],  # noqa: ARG002
    ) -> list[str | None]:
        return [chr(token_id) for token_id in token_ids]

    def observations(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],  # noqa: ARG002
        options: ChatOptions,  # noqa: ARG002
        room: int,  # noqa: ARG002
        calls: Sequence[Mapping[str, Any]] = (),  # noqa: ARG002
    ) -> list[TokenizedObservation]:
        contents = [message["content"] for message in messages]
        return [TokenizedObservation(list(content.encode()), content, was_cut=False) for content in contents]


class EndedRollouts(RolloutService):
    """Has all rollouts ready, and says in its metrics when it gave out the first and the last."""

    def __init__(self, results: list[SampleResult]) -> None:
        admission = Admission(AdmissionSettings(), max_model_len=1)
        super().__init__(None, {}, RemotePolicy(None), None, RequestLimits(), admission, TaskSampler({}))  # type: ignore[arg-type]
        self._ended_results = results

    async def rollout(
        self,
        _request: RolloutRequest,
        request_id: str,
        _body_bytes: int,
        _caller: Caller = ANYBODY,
        _progress: ProgressLog | None = None,
    ) -> RunningRollout:
        return EndedRequest(request_id, self._ended_results)


class AlwaysReady(Readiness):
    """There is nothing to wait for."""

    def __init__(self) -> None:
        pass

    async def check(self) -> list[DegradedPart]:
        return []


class EndedRequest(RunningRollout):
    def __init__(self, request_id: str, results: list[SampleResult]) -> None:
        self.request_id, self.echoed_bytes = request_id, 0
        self._context = RolloutContext(None, {}, Schedule())  # type: ignore[arg-type]
        self._ended_results = results
        self._first_at = self._last_at = 0.0
        self._results = self._play()

    async def _play(self) -> AsyncGenerator[EndedRollout, None]:
        self._first_at = time.monotonic()
        for position, result in enumerate(self._ended_results):
            self._last_at = time.monotonic()
            yield position, result

    @property
    def summary(self) -> RolloutSummary:
        metrics: RequestMetrics = {"first_at": self._first_at, "last_at": self._last_at}
        return RolloutSummary(
            request_id=self.request_id, metrics=metrics, policy=PolicyVersions(oldest="12", newest="12")
        )

    async def final_summary(self) -> RolloutSummary:
        return self.summary


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until the tensors were there: since the last token, and since the first rollout was handed over."""

    from_last_token_s: float
    at_once_s: float
    tensors_s: float
    """Of these, what `to_tensors` took."""


def main(rounds: Annotated[int, typer.Option(min=1)] = 7) -> None:
    with no_process_left(), serving() as url, RolloutClient(url) as client:
        ways: dict[str, Callable[[], Any]] = {
            "json": partial(client.rollout, SAMPLES, num_generations=GENERATIONS),
            "arrow": partial(client.rollout_arrow, SAMPLES, num_generations=GENERATIONS),
        }
        with console.status("Starting the server, and making the rollouts that it answers"):
            client.wait_until_ready()
        with console.status("Counting the bytes of an answer"):
            accepted = {"json": JSON, "arrow": ARROW}
            bytes_a_token = {way: wire_bytes(url, accept) / TOKENS for way, accept in accepted.items()}
        measured: dict[str, list[Round]] = {way: [] for way in ways}
        for _ in track(range(rounds), "Answering", console=console):
            for way, play in ways.items():
                measured[way].append(measure(play))
    report(bytes_a_token, measured)


def measure(play: Callable[[], Any]) -> Round:
    response = play()
    arrived_at = time.monotonic()
    tensors = to_tensors(response, pad_token_id=0)
    done_at = time.monotonic()
    if int(tensors.loss_mask.sum()) != TOKENS:
        raise RuntimeError("The tensors hold other tokens than the service sent.")
    metrics = response.metrics
    return Round(done_at - metrics["last_at"], done_at - metrics["first_at"], done_at - arrived_at)


def wire_bytes(url: str, accept: str) -> int:
    """Of the whole body, with what the transfer encoding adds to its chunks."""
    with httpx.stream("POST", f"{url}/rollout", json={"samples": SAMPLES}, headers={"accept": accept}) as answer:
        for _ in answer.iter_raw():
            pass
        return answer.num_bytes_downloaded


@contextmanager
def serving() -> Iterator[str]:
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.join()


def serve(port: int) -> None:
    rollouts = EndedRollouts(ended_rollouts())
    unused: Any = None
    services = AppServices(
        rollouts=rollouts,
        access=OPEN_TO_ALL,
        readiness=AlwaysReady(),
        scoring=unused,
        replayer=unused,
        calls=unused,
        tinker=unused,
    )
    uvicorn.run(build_http_app(services), port=port, log_level="critical")


def ended_rollouts() -> list[SampleResult]:
    draw, normal = random.Random(0), np.random.default_rng(0)
    return [
        ended_rollout(group, generation, draw, normal) for group in range(GROUPS) for generation in range(GENERATIONS)
    ]


def ended_rollout(group: int, generation: int, draw: random.Random, numbers: np.random.Generator) -> SampleResult:
    prompt = text(draw, 60)
    episode = Episode(
        EpisodeIdentity("bench", group * GENERATIONS + generation, group, generation, group, "math"),
        EpisodeStart(
            Prompt.of([Message(role="user", content=prompt, token_ids=list(prompt.encode()))]),
            {"ground_truth": str(draw.randrange(100))},
            (),
            SamplingOptions(),
            ChatOptions(),
        ),
        EpisodeLimits(max_seq_len=10**6, max_new_tokens=None, max_rollout_turns=TURNS),
        ByteChatTokenizer(),
    )
    for turn in range(TURNS):
        token_ids = packed_ids(list(text(draw, TOKENS_A_TURN).encode()))
        logprobs = packed_logprobs(-numbers.exponential(0.3, TOKENS_A_TURN))
        spans = (WeightSpan("12", 0, TOKENS_A_TURN),)
        episode.add_generation(Generation(token_ids, logprobs, "stop", spans))
        observation: ChatMessage = {"role": "user", "content": text(draw, 20)}
        is_right = draw.random() < 0.5
        episode.add_outcome(StepOutcome(observation, float(is_right), terminated=turn == TURNS - 1, answer="42"))
    return episode.result()


def text(draw: random.Random, length: int) -> str:
    known = VOCABULARY.split()
    words = (draw.choice(known) if draw.random() < 0.8 else str(draw.randrange(10_000)) for _ in range(length // 2))
    return " ".join(words).ljust(length)[:length]


def report(bytes_a_token: Mapping[str, float], measured: Mapping[str, list[Round]]) -> None:
    table = Table(
        *("answer", "bytes a token", "last token to tensors", "of that to_tensors", "at once"),
        title=f"{TOKENS:,} tokens with log-probabilities: medians, in milliseconds",
    )
    medians: dict[str, dict[str, float]] = {}
    for way, rounds in measured.items():
        names = ("from_last_token_s", "tensors_s", "at_once_s")
        medians[way] = {name: median(getattr(round_, name) for round_ in rounds) for name in names}
        table.add_row(way, f"{bytes_a_token[way]:.2f}", *(f"{1000 * value:.0f}" for value in medians[way].values()))
    console.print(table)
    speedup = {name: round(medians["json"][name] / medians["arrow"][name], 2) for name in medians["json"]}
    figures = {
        "arrow_bytes_per_token": round(bytes_a_token["arrow"], 3),
        "json_bytes_per_token": round(bytes_a_token["json"], 3),
        "arrow_speedup_over_json": speedup["from_last_token_s"],
        "arrow_speedup_over_json_at_once": speedup["at_once_s"],
        "arrow_last_token_to_tensors_s": round(medians["arrow"]["from_last_token_s"], 4),
        "json_last_token_to_tensors_s": round(medians["json"]["from_last_token_s"], 4),
    }
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
