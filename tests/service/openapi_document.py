"""The OpenAPI document of the application, and its operations by method and path."""

from typing import Any

from tests.service.scripted_http import ScriptedHttp

DOCUMENT: dict[str, Any] = ScriptedHttp().request("GET", "/openapi.json").json()
OPERATIONS: dict[str, dict[str, Any]] = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
