"""`GET /metrics`: the metrics of all replicas in Prometheus' text format."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from service.http.authorization import needs
from service.metrics.exporters import ExportersLost, all_metrics
from service.problems import not_ready
from service.routes import descriptions

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse, **needs("read"), **descriptions.METRICS)
async def metrics() -> Response:
    """Of rollouts, engines and Ray Serve, whichever replica answers. They are up to ten seconds old."""
    try:
        exposition = await all_metrics()
    except ExportersLost as error:
        raise not_ready(str(error)) from error
    return Response(exposition.encode(), media_type=PROMETHEUS)
