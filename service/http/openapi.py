"""How a route states who may use it, and what FastAPI cannot derive for the OpenAPI document from its signature.

`@router.post("/rollout", **needs("rollout"), ...)`, or `**OPEN`; both show in the document as `security`. The key of a
request is checked before any of its body is read: a route reads its body itself, not by a parameter, because FastAPI
reads those first.

The routes read some bodies and headers themselves, and every error is a problem document; the functions here describe
that. All schemas are components named after the contract's types, so that generated clients have types of these names.
"""

from collections.abc import Iterable
from typing import Annotated, Any, cast

from fastapi import Depends, FastAPI, Request, Security
from fastapi.openapi.models import HTTPBearer as BearerModel
from fastapi.security.base import SecurityBase
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.failures import StoreFailure
from rollout_client.contract.base import Problem
from service.access.access_control import AccessControl
from service.access.keys import Caller, Scope
from service.http.request_body import JSON
from service.problems import OVERLOADED, PROBLEM_JSON, QUOTA_EXCEEDED

OPEN: dict[str, Any] = {"openapi_extra": {"security": []}}
"""Arguments of a route's decorator: anybody may use the route, without a key."""


TINKER_PREFIX = "tml-"
SESSION_KEY = "SessionKey"
"""The name of its scheme in the OpenAPI document."""


class _KeyHeader(SecurityBase):
    """The `Authorization` headers of a request."""

    model = BearerModel(description="`Authorization: Bearer KEY`; the key must have the scope named here.")
    scheme_name = "Key"

    async def __call__(self, request: Request) -> list[str]:
        return request.headers.getlist("authorization")


def given_keys(request: Request) -> list[str]:
    """As the values of `Authorization` headers. Without one `X-Api-Key` counts, which Anthropic's clients send.

    Tinker's client sends it too, and takes only keys that begin with `TINKER_PREFIX`.
    """
    keys = [f"Bearer {key.removeprefix(TINKER_PREFIX)}" for key in request.headers.getlist("x-api-key")]
    return request.headers.getlist("authorization") or keys


def with_session_key(description: dict[str, Any]) -> dict[str, Any]:
    """A route's description, for a route that asks for the key of the session in its path."""
    extra = {**description.get("openapi_extra", {}), "security": [{SESSION_KEY: []}]}
    return {**description, "openapi_extra": extra}


def needs(scope: Scope, also_api_key: bool = False) -> dict[str, Any]:
    """Arguments of a route's decorator: a request needs a key with this scope, else it is refused (401, 403).

    Args:
        also_api_key: whether the key may also be in `X-Api-Key`, for the routes that Anthropic's clients call.
    """

    async def authorize(request: Request, authorization: Annotated[list[str], Depends(_KeyHeader())]) -> None:
        access: AccessControl = request.app.state.services.access
        request.state.caller = await access.caller_of(given_keys(request) if also_api_key else authorization, scope)

    return {"dependencies": [Security(authorize, scopes=[scope])]}


async def _authorized_caller(request: Request) -> Caller:
    """Fails on a route that states no scope."""
    return cast(Caller, request.state.caller)


AuthorizedCaller = Annotated[Caller, Depends(_authorized_caller)]


Document = dict[str, Any]
_NAMED_MODELS: dict[type[BaseModel], None] = {}
"""Models that `schema_of` was called with, in this order: no signature of a route names some of them."""
_SCHEMA_REFERENCE = "#/components/schemas/{model}"
BINARY: Document = {"type": "string", "format": "binary"}
_EVERY_REFUSAL = {
    422: "The request is not valid",
    500: "The service failed",
    503: "A deployment that the request needs does not answer",
}
_BODY_REFUSALS = {
    400: "The body cannot be read",
    408: "The body stopped arriving",
    413: "The body is too large",
    415: "The type or the encoding of the body is not supported",
}
_KEY_REFUSALS = {"401": "The request carries no valid key", "403": "The key does not have the scope of the route"}


def schema_of(model: type[BaseModel]) -> Document:
    _NAMED_MODELS[model] = None
    return {"$ref": _SCHEMA_REFERENCE.format(model=model.__name__)}


def content(schema: Document) -> Document:
    """One media type of a body."""
    return {"schema": schema}


def json_content(example: BaseModel) -> Document:
    """JSON of `example`'s type, with the fields of `example` that were set."""
    return {"schema": schema_of(type(example)), "example": example.model_dump(mode="json", exclude_unset=True)}


def json_request(example: BaseModel) -> Document:
    """The `openapi_extra` of a route that reads a JSON body itself."""
    return {"requestBody": {"required": True, "content": {JSON: json_content(example)}}}


def header_parameter(name: str, description: str, example: str) -> Document:
    """An optional header of a request."""
    schema = {"type": "string"}
    return {"name": name, "in": "header", "description": description, "schema": schema, "example": example}


def refusals(*failures: type[StoreFailure], reads_body: bool = False) -> dict[int | str, Document]:
    """The problem documents with which a route can respond, by status."""
    titles = {status: [title] for status, title in (_EVERY_REFUSAL | (_BODY_REFUSALS if reads_body else {})).items()}
    for failure in failures:
        titles.setdefault(failure.status, []).append(failure.title)
    return {status: refusal(said) for status, said in titles.items()}


def refusal(titles: Iterable[str]) -> Document:
    """A response with a problem document."""
    return {"description": "; ".join(titles), "content": {PROBLEM_JSON: content(schema_of(Problem))}}


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
    """Adds the types that no signature names, and how the keys of requests are given and refused."""
    components = derived["components"]
    _, named = models_json_schema([(model, "validation") for model in _NAMED_MODELS], ref_template=_SCHEMA_REFERENCE)
    components["schemas"] |= named["$defs"]
    components["securitySchemes"][SESSION_KEY] = {
        "type": "http",
        "scheme": "bearer",
        "description": "The key of the session in the path, as `POST /sessions` has answered it; or in `X-Api-Key`.",
    }
    for path in derived["paths"].values():
        for operation in path.values():
            if operation.get("security"):
                operation["responses"] |= {status: refusal([title]) for status, title in _KEY_REFUSALS.items()}
    return derived
