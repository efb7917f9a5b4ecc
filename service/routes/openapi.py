"""The OpenAPI page: what FastAPI cannot know by itself."""

from typing import Any

from fastapi import FastAPI

from rollout_client.contract import RolloutRequest


def describe_request_body(app: FastAPI) -> None:
    """Puts the request's schema on the OpenAPI page: the route reads its body itself, so FastAPI does not know it."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        request_schema = RolloutRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        components = schema["components"]["schemas"]
        components.update(request_schema.pop("$defs"))
        components["RolloutRequest"] = request_schema
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
