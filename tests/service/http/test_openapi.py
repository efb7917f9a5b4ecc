"""The OpenAPI document: valid, complete, and good enough to generate a client that reads the service's responses."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from openapi_python_client import generate
from openapi_python_client.config import Config, ConfigFile, MetaType
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from rollout_client.arrow.schema import ARROW
from rollout_client.contract.base import Problem
from tests.service.openapi_document import DOCUMENT, OPERATIONS
from tests.service.scripted_http import NDJSON, ScriptedHttp

Json = dict[str, Any]
JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
MODEL_SERVER_ERRORS = {"400": ({PROBLEM_JSON, JSON},), "404": ({JSON}, {PROBLEM_JSON, JSON})}
"""Where the errors of OpenAI's and Anthropic's APIs have a form of their own."""


def nodes(node: Any, path: str = "#") -> Iterator[tuple[str, Json]]:
    """Every object in `node`, with its path."""
    if isinstance(node, dict):
        yield path, node
        for name, child in node.items():
            yield from nodes(child, f"{path}/{name}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from nodes(child, f"{path}/{index}")


def resolved(reference: str) -> Any:
    """What a `$ref` points at; raises `KeyError` if it points at nothing."""
    node: Any = DOCUMENT
    assert reference.startswith("#/")
    for name in reference.removeprefix("#/").split("/"):
        node = node[name.replace("~1", "/").replace("~0", "~")]
    return node


@pytest.mark.slow
def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT)


def test_every_reference_resolves_to_a_component() -> None:
    references = [node["$ref"] for _, node in nodes(DOCUMENT) if isinstance(node.get("$ref"), str)]
    assert len(references) > 100
    for reference in references:
        resolved(reference)
    assert [path for path, node in nodes(DOCUMENT) if "$defs" in node] == []


def test_every_type_and_every_property_has_a_description() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert [name for name, schema in schemas.items() if name != "JsonValue" and not schema.get("description")] == []
    properties = {
        f"{name}.{field}": schema
        for name, owner in schemas.items()
        for field, schema in owner.get("properties", {}).items()
    }
    assert len(properties) > 100
    assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_every_parameter_and_every_header_has_a_description() -> None:
    described = [node for path, node in nodes(DOCUMENT) if re.search(r"/(parameters|headers)/[^/]+$", path)]
    assert len(described) > 50
    for node in described:
        node = resolved(node["$ref"]) if "$ref" in node else node
        assert node.get("description"), node


def test_every_operation_has_an_id_of_its_own_a_tag_and_a_summary() -> None:
    ids = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(ids)) == len(ids)
    for name, operation in OPERATIONS.items():
        assert len(operation["tags"]) == 1, name
        assert operation["summary"], name
        assert operation["description"], name


def test_every_route_is_documented_under_v1_and_has_an_alias() -> None:
    routes = [route for route in ScriptedHttp().app.routes if isinstance(route, APIRoute)]
    routes = [route for route in routes if not {"tinker", "trainers"} & {*route.tags}]
    documented = {(route.path, *route.methods) for route in routes if route.include_in_schema}
    assert documented == {(f"/v1{route.path}", *route.methods) for route in routes if not route.include_in_schema}
    assert {path.replace(":path}", "}") for path, *_ in documented} == set(DOCUMENT["paths"])


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_json_body_has_a_type_and_the_examples_fit_theirs(name: str) -> None:
    operation = OPERATIONS[name]
    requests = [operation["requestBody"]["content"]] if "requestBody" in operation else []
    responses = [response["content"] for response in operation["responses"].values() if "content" in response]
    described = [content[one] for content in [*requests, *responses] for one in (JSON, PROBLEM_JSON) if one in content]
    assert described
    for body in described:
        assert body["schema"]
        if "example" in body:
            OAS31Validator({**body["schema"], "components": DOCUMENT["components"]}).validate(body["example"])
    for content in requests:
        assert JSON not in content or "example" in content[JSON]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_error_is_a_problem(name: str) -> None:
    responses: dict[str, Json] = OPERATIONS[name]["responses"]
    assert {"422", "500", "503"} <= responses.keys()
    for status, response in responses.items():
        kinds = response.get("content", {})
        if status >= "400" and kinds.keys() not in MODEL_SERVER_ERRORS.get(status, ()):
            assert kinds.keys() == {PROBLEM_JSON}
        if status >= "400" and PROBLEM_JSON in kinds:
            assert kinds[PROBLEM_JSON]["schema"] == {"$ref": "#/components/schemas/Problem"}


def test_a_rollout_is_documented_with_its_types() -> None:
    operation = OPERATIONS["POST /v1/rollout"]
    body, content = operation["requestBody"]["content"], operation["responses"]["200"]["content"]
    assert {kind: body[kind]["schema"] for kind in body} == {JSON: {"$ref": "#/components/schemas/RolloutRequest"}}
    assert {kind: content[kind]["schema"] for kind in content} == {
        JSON: {"$ref": "#/components/schemas/RolloutResponse"},
        NDJSON: {"$ref": "#/components/schemas/StreamLine"},
        ARROW: {"type": "string", "format": "binary"},
    }


@pytest.fixture(scope="module")
def generated_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The models of a client that openapi-python-client generates from the document."""
    folder = tmp_path_factory.mktemp("generated")
    document = folder / "openapi.json"
    document.write_text(json.dumps(DOCUMENT))
    package = folder / "generated_rollout_client"
    config = Config.from_sources(
        ConfigFile(post_hooks=[]),
        meta_type=MetaType.NONE,
        document_source=Path(document),
        file_encoding="utf-8",
        overwrite=False,
        output_path=package,
    )
    assert [f"{error.header}: {error.detail}" for error in generate(config=config) if error.level.name == "ERROR"] == []
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("generated_rollout_client.models")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "generated_rollout_client"]:
            del sys.modules[name]


@pytest.mark.slow
def test_a_generated_client_makes_a_request_and_reads_the_answers(generated_client: Any) -> None:
    message = generated_client.PromptMessage(generated_client.PromptMessageRole.USER, "What is 1 + 1?")
    sample = generated_client.SampleInput(task_name="math", messages=[message])
    request = generated_client.RolloutRequest(samples=[sample], num_generations=2)
    document = ScriptedHttp().post(request.to_dict()).json()
    response = generated_client.RolloutResponse.from_dict(document)
    assert response.samples[0].message_log[1].generation_logprobs == [-1.0]
    assert response.to_dict() == document
    document = ScriptedHttp().post({"samples": []}).json()
    problem = generated_client.Problem.from_dict(document)
    assert (problem.status, problem.errors[0].field) == (422, "body")
    assert Problem.model_validate(problem.to_dict()) == Problem.model_validate(document)
