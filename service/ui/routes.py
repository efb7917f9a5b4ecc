"""`GET /ui`: a page that shows the service, plays samples and reads rollouts.

The files need no key and hold no data. What the page shows it gets from the other routes, with the key of whoever uses
it. Text of models is shown there: the page may run its own files only, and ask only the service that it came from.

A path that leads out of the folder of the page is not found.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"
_FILES = StaticFiles(directory=PAGE)
_CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # Images of rollouts are fetched with the caller's key, which an <img> does not send.
        "img-src 'self' blob:",
        "connect-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup or code nowhere; the one policy is for the address of the worker.
        "require-trusted-types-for 'script'",
        "trusted-types rollout-worker",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again each time, answered by 304: a page never mixes the modules of two versions.
    "Cache-Control": "no-cache",
}


async def _ui(request: Request) -> Response:
    """Relative, so that it is right under every prefix and behind every gateway."""
    query = f"?{request.url.query}" if request.url.query else ""
    return Response(status_code=307, headers={"Location": f"ui/{query}"})


async def _ui_file(request: Request) -> Response:
    """Raises `HTTPException`: 404 for a path that is not a file of the page."""
    response = await _FILES.get_response(request.path_params["path"] or "index.html", request.scope)
    response.headers.update(_HEADERS)
    return response


router = APIRouter()
# Not as routes of the API: they are in no OpenAPI document, and read no parameters.
router.add_route("/ui", _ui, methods=["GET"], include_in_schema=False)
router.add_route("/ui/{path:path}", _ui_file, methods=["GET"], include_in_schema=False)
