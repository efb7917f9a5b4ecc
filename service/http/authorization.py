"""How a route states who may use it: `@router.post("/rollout", **needs("rollout"), ...)`, or `**OPEN`.

Both show in the OpenAPI document as `security`. The key of a request is checked before any of its body is read: a route
reads its body itself, not by a parameter, because FastAPI reads those first.
"""

from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.openapi.models import HTTPBearer as BearerModel
from fastapi.security.base import SecurityBase

from service.access.access_control import AccessControl
from service.access.keys import Caller, Scope

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
    caller: Caller = request.state.caller
    return caller


AuthorizedCaller = Annotated[Caller, Depends(_authorized_caller)]
