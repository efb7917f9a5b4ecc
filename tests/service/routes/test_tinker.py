"""Tinker's sampling API: what its client sends, what the engines are asked, and what the client gets, byte by byte.

The client itself, against the running service: `tests/sockets/test_tinker.py`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from struct import pack
from typing import Any

import httpx
import pytest

from deployments.failures import GenerationLost, GenerationRejected
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.model_server import ServedPart, ServedTokens
from rollout_client.contract.base import FieldProblem
from service.access.access_control import OPEN_TO_ALL, AccessControl
from service.settings import AdmissionSettings
from tests.fakes.model_server import ScriptedModelServer
from tests.fakes.scoring_generator import ScoringGenerator
from tests.service.keyed_http import access_of_a_key
from tests.service.scripted_http import Returned, ScriptedHttp

SAMPLER = f"{'0' * 32}-train:0::"
PROMPT = [5, 6, 7, 8]
CHOICES: list[dict[str, Any]] = [
    {
        "finish_reason": "stop",
        "token_ids": [9, 300, 3],
        "logprobs": {
            "token_logprobs": [-0.5, -1.5, -0.25],
            "top_logprobs": [{"token_id:9": -0.5}, {"token_id:300": -1.5, "token_id:4": -0.75, "token_id:2": -3}, None],
        },
    },
    {"finish_reason": "length", "token_ids": [], "logprobs": {"token_logprobs": [], "top_logprobs": []}},
]  # fmt: skip


def completed(choices: Sequence[dict[str, Any]] = CHOICES) -> list[ServedPart | Exception | float]:
    return [
        ServedPart(json.dumps({"choices": choices}).encode(), 200, "application/json"),
        ServedPart(tokens=ServedTokens(4, 3)),
    ]


def sample(num_samples: int = 2, seq_id: int = 0, sampler: str = SAMPLER, **fields: Any) -> dict[str, Any]:
    """The body of `asample`, as the client writes it."""
    return {
        "num_samples": num_samples,
        "prompt": {"chunks": [{"tokens": PROMPT[:1], "type": "encoded_text"}, {"tokens": PROMPT[1:]}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1, "top_k": -1, "top_p": 1},
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **fields,
    }


class Client:
    """Speaks HTTP as Tinker's client does, over one application."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"x-api-key": f"tml-{key}"}

    async def post(self, call: str, body: Any) -> httpx.Response:
        return await self._http.post(f"/api/v1/{call}", json=body, headers=self._headers)

    async def get(self, call: str) -> httpx.Response:
        return await self._http.get(f"/api/v1/{call}", headers=self._headers)

    async def retrieve(self, request_id: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})

    async def sampled(self, **fields: Any) -> httpx.Response:
        return await self.retrieve((await self.post("asample", sample(**fields))).json()["request_id"])


class World:
    def __init__(
        self,
        parts: Sequence[ServedPart | Exception | float] | None = None,
        access: AccessControl = OPEN_TO_ALL,
        admission: AdmissionSettings | None = None,
        key: str = "any",
    ) -> None:
        self.server = ScriptedModelServer(completed() if parts is None else parts)
        self.generator = ScoringGenerator([])
        self.service = ScriptedHttp(
            model_server=self.server, generator=self.generator, access=access, admission=admission
        )
        self._key = key

    def run(self, play: Callable[[Client], Awaitable[Returned]]) -> Returned:
        return asyncio.run(self.service.asked(lambda http: play(Client(http, self._key))))

    def post(self, call: str, body: Any) -> httpx.Response:
        return self.run(lambda client: client.post(call, body))

    def sampled(self, **fields: Any) -> httpx.Response:
        return self.run(lambda client: client.sampled(**fields))

    @property
    def completion(self) -> dict[str, Any]:
        [request] = self.server.requests
        fields: dict[str, Any] = json.loads(request.body)
        return fields


NAN, UNKNOWN = float("nan"), -99999.0
"""The log-probability of the first token, and that of a token that the engine did not name, which has the id 0."""


def packed(kind: str, *numbers: float) -> bytes:
    """Numbers as the client reads them."""
    return pack(f"<{len(numbers)}{kind}", *numbers)


def test_samples_are_those_of_a_text_completion_of_the_same_tokens() -> None:
    world = World()
    answer = world.sampled(topk_sample_logprobs=2)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-protobuf")
    for part in (
        packed("i", 9, 300, 3) + b"\x1a\x0c" + packed("f", -0.5, -1.5, -0.25),
        packed("i", 9, 0, 4, 300, 0, 0),
        packed("f", -0.5, UNKNOWN, -0.75, -1.5, UNKNOWN, UNKNOWN),
    ):
        assert part in answer.content
    assert world.completion == {
        "prompt": PROMPT,
        "n": 2,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert world.generator.requests == []


@pytest.mark.parametrize(
    ("stop", "fields"),
    [
        (None, {}),
        ("END", {"stop": ["END"]}),
        (["a", "b"], {"stop": ["a", "b"]}),
        ([3, 4], {"stop_token_ids": [3, 4]}),
        ([], {"ignore_eos": True}),
    ],
)
def test_stops_are_texts_or_ids_and_an_empty_list_stops_nowhere(stop: Any, fields: dict[str, Any]) -> None:
    world = World()
    params = {"max_tokens": 3, "seed": 4, "temperature": 0} | ({} if stop is None else {"stop": stop})
    assert world.sampled(sampling_params=params).status_code == 200
    sent = world.completion
    assert {name: sent[name] for name in ("stop", "stop_token_ids", "ignore_eos") if name in sent} == fields
    assert (sent["seed"], sent["temperature"], sent["max_tokens"]) == (4, 0.0, 3)


def test_several_greedy_samples_are_one_completion() -> None:
    world = World(completed(CHOICES[:1]))
    answer = world.sampled(num_samples=3, sampling_params={"max_tokens": 5, "temperature": 0})
    assert answer.content.count(packed("i", 9, 300, 3)) == 3
    assert (world.completion["n"], [request.choices for request in world.server.requests]) == (1, [1])


def test_log_probabilities_of_the_prompt_are_scored() -> None:
    world = World()
    answer = world.sampled(prompt_logprobs=True, topk_prompt_logprobs=2).content
    assert packed("f", NAN, -6.0, -7.0, -8.0) in answer
    assert packed("i", 0, 0, *[0, 1] * 3) in answer
    assert packed("f", UNKNOWN, UNKNOWN, *[0.0, -1.0] * 3) in answer
    [scored], [sampled] = world.generator.requests, world.server.requests
    assert list(scored.prompt_token_ids) == PROMPT
    assert scored.share.weight == sampled.share.weight == 1.0
    assert sampled.share.id == f"tinker-{SAMPLER.partition(':')[0]}"


@pytest.mark.parametrize(("last_n", "scored"), [(1, [-8.0]), (4, [-6.0, -7.0, -8.0]), (9, [-6.0, -7.0, -8.0])])
def test_the_last_tokens_of_a_prompt_are_scored_alone(last_n: int, scored: list[float]) -> None:
    answer = World().sampled(prompt_logprobs=True, prompt_logprobs_last_n=last_n)
    assert packed("f", *[NAN] * (4 - len(scored)), *scored) in answer.content


def test_a_client_begins_as_it_is_told_to() -> None:
    async def play(client: Client) -> None:
        assert not any((await client.post("client/config", {"sdk_version": "0.38.0"})).json().values())
        assert (await client.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json() == {
            "sample_cancel_enabled": True
        }
        opened = {"tags": [], "user_metadata": {"priority": "batch"}, "sdk_version": "0.38.0", "type": "create_session"}
        session = (await client.post("create_session", opened)).json()["session_id"]
        assert (await client.post("session_heartbeat", {"session_id": session})).status_code == 200
        assert (await client.post("telemetry", {"events": []})).json() == {"status": "accepted"}
        asked = {"session_id": session, "sampling_session_seq_id": 3, "model_path": "tinker://run-b/7"}
        sampler = (await client.post("create_sampling_session", asked)).json()["sampling_session_id"]
        assert sampler == f"{session}:3:run-b:7"
        said = (await client.get(f"samplers/{sampler}")).json()
        assert said == {"sampler_id": sampler, "base_model": "tiny", "model_path": "tinker://run-b/7"}
        assert (await client.sampled(sampler=sampler)).status_code == 200
        assert (await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status_code == 200
        [model] = (await client.get("get_server_capabilities")).json()["supported_models"]
        assert model == {"model_name": "tiny", "max_context_length": 100, "trainable": False, "sampleable": True}

    world = World()
    world.run(play)
    [request] = world.server.requests
    assert (request.policy, request.weight_version, request.share.weight) == ("run-b", 7, 0.0625)
    assert world.service.store.calls == [("wait_for", "run-b", 0, 7, wait_s) for wait_s in (30.0, None)]


@pytest.mark.parametrize(
    ("path", "weights"),
    [
        ("tinker://run-b", "run-b:"),
        ("tinker://run-b/12", "run-b:12"),
        ("tinker://run-b/sampler_weights/12", "run-b:12"),
        ("tinker://7", ":7"),
        (f"tinker://{2**63 - 1}", f":{2**63 - 1}"),
        ("tinker://run-b/" + "1" * 20, None),
        ("tinker://\N{ARABIC-INDIC DIGIT SEVEN}", None),
        ("tinker://run-b/weights/12", None),
        ("tinker://", None),
        ("run-b", None),
        (None, ":"),
    ],
)
def test_a_path_names_a_policy_or_a_version(path: str | None, weights: str | None) -> None:
    session = SAMPLER.partition(":")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    answer = World().post("create_sampling_session", asked)
    if weights is None:
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "model_path")
    else:
        assert answer.json()["sampling_session_id"] == f"{session}:0:{weights}"


def test_weights_that_are_not_current_are_refused_for_good() -> None:
    world = World()
    problem = FieldProblem(field="policy.version", message="6 is current")
    world.service.store.failures["wait_for"] = PolicyNotCurrent(problem)
    asked = {"session_id": SAMPLER.partition(":")[0], "sampling_session_seq_id": 0, "model_path": "tinker://7"}
    opened = world.post("create_sampling_session", asked)
    assert (opened.status_code, opened.json()["errors"][0]["message"]) == (422, "6 is current")
    assert world.sampled(sampler=f"{SAMPLER}7").json() == {"error": "policy.version: 6 is current.", "category": "user"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 101}, "num_samples"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [262]}]}}, "prompt[0]"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}}, "prompt.chunks[0].type"),
        ({"sampling_params": {"top_p": 1.5}}, "sampling_params.top_p"),
        ({"sampling_params": {"seed": 2**63}}, "sampling_params.seed"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ({"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"sampler": "mine"}, "sampling_session_id"),
        ({"sampler": f"{SAMPLER}{'9' * 20}"}, "sampling_session_id"),
        ({"sampler": f"{'0' * 32}-nan:0::"}, "sampling_session_id"),
        ({"model_path": "tinker://run-b"}, "model_path"),
    ],
)
def test_what_is_not_valid_or_not_here_is_refused_by_its_name(fields: dict[str, Any], named: str) -> None:
    world = World()
    refused = world.post("asample", sample(**fields))
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, named)
    assert world.server.requests == []


def test_a_refusal_of_the_engine_is_the_users_failure_and_is_not_repeated() -> None:
    refusal = json.dumps({"error": {"message": "temperature must be in [0, 2], got 4.0.", "code": 400}}).encode()
    answer = World([ServedPart(refusal, 400, "application/json", ServedTokens())]).sampled()
    assert answer.json() == {"error": "temperature must be in [0, 2], got 4.0.", "category": "user"}
    rejected = World([GenerationRejected("It does not fit.")]).sampled()
    assert rejected.json() == {"error": "It does not fit.", "category": "user"}


def test_a_loss_of_the_fleet_lets_the_client_make_the_call_anew() -> None:
    answer = World([GenerationLost("It is gone.")]).sampled()
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:rollout:problem:future-lost")
    assert answer.json()["detail"] == "request_id: It is gone. Send the call again."


def test_the_same_call_again_starts_no_second_work() -> None:
    async def play(client: Client) -> None:
        first, again, other = [(await client.post("asample", sample(seq_id=seq_id))).json() for seq_id in (4, 4, 5)]
        assert first == again != other
        assert len(set(first["sample_sequence_ids"])) == 2
        for answer in (first, again, other):
            assert (await client.retrieve(answer["request_id"])).status_code == 200

    world = World()
    world.run(play)
    assert len(world.server.requests) == 2
    assert world.service.admission.in_flight.rollouts == 0


def test_a_call_holds_its_samples_until_they_are_there() -> None:
    admission = AdmissionSettings(max_rollouts=3)

    async def play(client: Client) -> None:
        first = (await client.post("asample", sample(seq_id=0))).json()
        assert (await client.post("asample", sample(seq_id=1))).status_code == 429
        assert (await client.retrieve(first["request_id"])).status_code == 200
        assert (await client.post("asample", sample(seq_id=1))).status_code == 200

    World([0.05, *completed()], admission=admission).run(play)


def test_a_cancelled_call_leaves_the_engine_and_frees_what_it_holds() -> None:
    async def play(client: Client) -> None:
        started = (await client.post("asample", sample())).json()
        await asyncio.sleep(0)
        assert (await client.post("cancel_future", {"request_id": started["request_id"]})).status_code == 200
        await asyncio.sleep(0.01)
        assert (await client.retrieve(started["request_id"])).status_code == 410

    world = World([60.0, *completed()])
    world.run(play)
    assert (world.server.was_left, world.service.admission.in_flight.rollouts) == (True, 0)


@pytest.mark.parametrize("call", ["create_model", "forward_backward", "optim_step", "save_weights", "weights_info"])
def test_training_is_refused_with_a_status_that_is_not_repeated(call: str) -> None:
    refused = World().post(call, {})
    assert (refused.status_code, refused.json()["type"]) == (404, "urn:rollout:problem:not-trained-here")
    assert refused.json()["detail"].startswith(f"{call} is not here: this service samples and does not train.")


def test_a_key_is_the_services_own_behind_tinkers_prefix(tmp_path: Path) -> None:
    access, key = access_of_a_key(tmp_path)
    assert World(access=access, key=key).sampled().status_code == 200
    assert World(access=access, key="other").post("asample", sample()).status_code == 401
