"""The spans of a request, its rollouts and their calls, as an exporter in memory gets them."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from deployments.failures import GenerationLost
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest
from deployments.protocols.model_server import ServedPart
from rollout_env import StepOutcome
from service.rollouts.progress import UNOBSERVED
from service.settings import TracingSettings
from service.tracing.spans import TracedRollouts, TracingMiddleware, tracer_of
from tests.fakes.model_server import ScriptedModelServer
from tests.service.rollouts.playing import async_context, collect
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, outcome
from tests.service.scripted_http import ScriptedHttp

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@contextmanager
def exported(sample_rate: float = 1.0) -> Iterator[tuple[Tracer, list[ReadableSpan]]]:
    """A tracer, and a list that has its spans when the block has ended."""
    exporter = InMemorySpanExporter()
    settings = TracingSettings(endpoint="http://collector:4318/v1/traces", sample_rate=sample_rate)
    tracer = tracer_of(settings, "replica-1", "1.2.3", exporter)
    spans: list[ReadableSpan] = []
    yield tracer, spans
    provider = tracer.span_processor  # type: ignore[attr-defined]
    provider.force_flush()
    spans += exporter.get_finished_spans()


class NotingGenerator(ScriptedGenerator):
    """Notes the traceparents of its calls in the list that it is given, as the environment below does."""

    def __init__(self, noted: list[str], texts: list[str | Exception]) -> None:
        super().__init__(texts)
        self._noted = noted

    async def generate(self, request: GenerationRequest) -> Generation:
        self._noted.append(request.traceparent)
        return await super().generate(request)


class NotingEnvironment(ScriptedEnvironment):
    def __init__(self, noted: list[str], outcomes: list[StepOutcome]) -> None:
        super().__init__(outcomes)
        self._noted = noted

    async def step(self, request: StepRequest) -> StepOutcome:
        self._noted.append(request.traceparent)
        return await super().step(request)


def played(tracer: Tracer) -> list[str]:
    """The traceparents of the calls of a rollout of two turns, whose second generation fails once."""
    noted = list[str]()
    generator = NotingGenerator(noted, ["A", GenerationLost("The replica died."), "B"])
    environment = NotingEnvironment(noted, [outcome("O", 0.5), outcome("O", 1.0, terminated=True)])
    context = replace(async_context(generator, environment), observer=TracedRollouts(tracer, UNOBSERVED))
    with tracer.start_as_current_span("request"):
        results = collect([EpisodeRecipe(retries=1).make()], context)
    assert results[0].status == "completed"
    return noted


def path_of(span: ReadableSpan, by_id: dict[int, ReadableSpan]) -> str:
    parent = by_id.get(span.parent.span_id) if span.parent else None
    return f"{path_of(parent, by_id)}/{span.name}" if parent else span.name


def test_a_rollout_has_a_span_for_each_turn_generation_and_step() -> None:
    with exported() as (tracer, spans):
        played(tracer)
    by_id = {span.context.span_id: span for span in spans if span.context}
    in_order = sorted(spans, key=lambda span: (span.start_time, span.name != "request"))
    assert sorted(path_of(span, by_id) for span in in_order) == [
        "request",
        "request/rollout",
        "request/rollout/turn",
        "request/rollout/turn",
        *["request/rollout/turn/generate"] * 3,
        *["request/rollout/turn/step"] * 2,
    ]
    assert [span.name for span in spans if not span.status.is_ok and span.status.description] == ["generate"]
    [rollout] = [span for span in spans if span.name == "rollout"]
    assert rollout.attributes == {
        "rollout.task_name": "task",
        "rollout.id": "request-0-0",
        "rollout.record": "/v1/rollouts/request-0-0",
        "rollout.sample": 0,
        "rollout.generation_index": 0,
    }
    assert rollout.resource.attributes["service.instance.id"] == "replica-1"


def test_each_call_is_sent_the_span_that_it_belongs_below() -> None:
    with exported() as (tracer, spans):
        noted = played(tracer)
    calls = [span.context for span in spans if span.name in ("generate", "step") and span.context]
    assert sorted(noted) == sorted(f"00-{one.trace_id:032x}-{one.span_id:016x}-{one.trace_flags:02x}" for one in calls)


def test_only_the_first_rollouts_of_a_request_have_spans() -> None:
    noted = list[str]()
    with exported() as (tracer, spans):
        observer = TracedRollouts(tracer, UNOBSERVED, rollouts_per_request=2)
        for _ in range(2):
            generator = NotingGenerator(noted, ["A"] * 3)
            environment = ScriptedEnvironment([outcome("O", 1.0, terminated=True)] * 3)
            context = replace(async_context(generator, environment), observer=observer)
            with tracer.start_as_current_span("request"):
                collect([EpisodeRecipe(position=position).make() for position in range(3)], context)
    assert Counter(span.name for span in spans) == {"request": 2, "rollout": 4, "turn": 4, "generate": 4, "step": 4}
    assert [traceparent == "" for traceparent in noted] == [False, False, True] * 2


def app_with(tracer: Tracer) -> TestClient:
    app = FastAPI()

    @app.get("/tasks/{name}")
    async def task(name: str) -> str:
        await asyncio.sleep(0)
        assert trace.get_current_span().get_span_context().trace_id == int(TRACE, 16)
        return name

    app.add_middleware(TracingMiddleware, tracer=tracer)
    return TestClient(app)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_span_of_a_request_is_below_that_of_its_caller(rate: float) -> None:
    with exported(rate) as (tracer, spans):
        assert app_with(tracer).get("/tasks/math", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"}).json() == "math"
    [span] = spans
    assert span.name == "GET /tasks/{name}"
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER)
    assert span.attributes == {
        "http.request.method": "GET",
        "url.path": "/tasks/math",
        "http.route": "/tasks/{name}",
        "http.response.status_code": 200,
    }


def test_a_request_whose_caller_does_not_sample_it_is_not_sampled() -> None:
    with exported() as (tracer, spans):
        app_with(tracer).get("/tasks/math", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert spans == []


def test_a_stream_that_fails_after_its_status_was_sent_is_an_error() -> None:
    first = ServedPart(b"data: {}\n\n", 200, "text/event-stream; charset=utf-8")
    service = ScriptedHttp(model_server=ScriptedModelServer([first, GenerationLost("It is gone.")]))
    with exported() as (tracer, spans), TestClient(TracingMiddleware(service.app, tracer)) as client:
        assert client.post("/v1/chat/completions", json={"messages": [], "stream": True}).status_code == 200
    [span] = spans
    assert span.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]
