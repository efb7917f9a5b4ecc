"""The OpenAPI document: what FastAPI cannot derive from the signatures of the routes.

The routes read some bodies and headers themselves, and every error is a problem document; the functions here describe
that. All schemas are components named after the contract's types, so that generated clients have types of these names.
"""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.failures import StoreFailure
from service.http.authorization import SESSION_KEY
from service.http.examples import PROBLEM, REQUEST_ID
from service.http.request_body import JSON
from service.problems import OVERLOADED, PROBLEM_JSON, QUOTA_EXCEEDED, REQUEST_ID_HEADER

Document = dict[str, Any]
NAMED_MODELS: dict[type[BaseModel], None] = {}
"""Models that `schema_of` was called with, in this order: no signature of a route names some of them."""
SCHEMA_REFERENCE = "#/components/schemas/{model}"
BINARY: Document = {"type": "string", "format": "binary"}
REQUEST_ID_VALUE: Document = {
    "description": "Id of the request, in every log line about it: the caller's own or a new one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[ -~]+$"},
    "example": REQUEST_ID,
}
RETRY_AFTER: Document = {
    "description": "Seconds to wait before trying again.",
    "schema": {"type": "integer", "minimum": 0},
    "example": 2,
}
EVERY_REFUSAL = {
    422: "The request is not valid",
    500: "The service failed",
    503: "A deployment that the request needs does not answer",
}
BODY_REFUSALS = {
    400: "The body cannot be read",
    408: "The body stopped arriving",
    413: "The body is too large",
    415: "The type or the encoding of the body is not supported",
}
KEY_REFUSALS = {401: "The request carries no valid key", 403: "The key does not have the scope of the route"}

WITH_RETRY_AFTER = ("429", "503")


def schema_of(model: type[BaseModel]) -> Document:
    NAMED_MODELS[model] = None
    return {"$ref": SCHEMA_REFERENCE.format(model=model.__name__)}


def content(schema: Document) -> Document:
    """One media type of a body."""
    return {"schema": schema}


def json_content(example: BaseModel) -> Document:
    """JSON of `example`'s type, with the fields of `example` that were set."""
    return {"schema": schema_of(type(example)), "example": example.model_dump(mode="json", exclude_unset=True)}


def json_response(example: BaseModel) -> Document:
    return {"content": {JSON: json_content(example)}}


def json_request(example: BaseModel) -> Document:
    """The `openapi_extra` of a route that reads a JSON body itself."""
    return {"requestBody": {"required": True, "content": {JSON: json_content(example)}}}


def header_parameter(name: str, description: str, example: str) -> Document:
    """An optional header of a request."""
    schema = {"type": "string"}
    return {"name": name, "in": "header", "description": description, "schema": schema, "example": example}


def refusals(*failures: type[StoreFailure], reads_body: bool = False) -> dict[int | str, Document]:
    """The problem documents with which a route can respond, by status."""
    titles = {status: [title] for status, title in (EVERY_REFUSAL | (BODY_REFUSALS if reads_body else {})).items()}
    for failure in failures:
        titles.setdefault(failure.status, []).append(failure.title)
    return {status: refusal(said) for status, said in titles.items()}


def refusal(titles: Iterable[str]) -> Document:
    """A response with a problem document."""
    return {"description": "; ".join(titles), "content": {PROBLEM_JSON: json_content(PROBLEM)}}


def limited(*failures: type[StoreFailure]) -> Document:
    """The 429 of a route that is admitted by load and quota, or refused by `failures`."""
    return refusal([OVERLOADED.title, QUOTA_EXCEEDED.title, *(failure.title for failure in failures)])


def complete_document(app: FastAPI) -> None:
    """Makes `app.openapi` return the complete document."""
    derive = app.openapi

    def openapi() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(derive())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(derived: Document) -> Document:
    """Adds the types that no signature names, and the headers that all requests and responses have."""
    components = derived["components"]
    _, named = models_json_schema([(model, "validation") for model in NAMED_MODELS], ref_template=SCHEMA_REFERENCE)
    components["schemas"] |= named["$defs"]
    components["parameters"] = {"RequestId": {"name": REQUEST_ID_HEADER, "in": "header", **REQUEST_ID_VALUE}}
    components["securitySchemes"][SESSION_KEY] = {
        "type": "http",
        "scheme": "bearer",
        "description": "The key of the session in the path, as `POST /sessions` has answered it; or in `X-Api-Key`.",
    }
    components["headers"] = {"RequestId": REQUEST_ID_VALUE, "RetryAfter": RETRY_AFTER}
    for path in derived["paths"].values():
        for operation in path.values():
            operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/RequestId"})
            if operation.get("security"):
                operation["responses"] |= {str(status): refusal([title]) for status, title in KEY_REFUSALS.items()}
            for status, response in operation["responses"].items():
                response["headers"] = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
                if status in WITH_RETRY_AFTER:
                    response["headers"]["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
    return derived
