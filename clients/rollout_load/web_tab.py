"""The summary while a run goes on: the tab "Rollouts" of locust's web interface, and `GET /rollouts` for programs."""

import json
from typing import Any

from flask import Response, jsonify, request
from locust.env import Environment

from rollout_load.report import rows_of
from rollout_load.summary import summary_of
from rollout_load.totals import LoadTotals

KEY = "rollouts"


def add_tab(environment: Environment, totals: LoadTotals) -> None:
    """Adds both to the web interface of `environment`, which has one."""
    web_ui = environment.web_ui
    assert web_ui is not None
    app = web_ui.app
    assert app is not None
    columns = [{"key": "name", "title": "Name"}, {"key": "value", "title": "Value"}]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Rollouts", "key": KEY}],
        "extended_tables": [{"key": KEY, "structure": columns}],
    }

    def rows() -> list[dict[str, str]]:
        return [{"name": name, "value": value} for name, value in rows_of(summary_of(environment.stats, totals))]

    @app.after_request
    def with_rows(response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json:
            known: dict[str, Any] = response.get_json()
            response.set_data(json.dumps(known | {"extended_stats": [{"key": KEY, "data": rows()}]}))
        return response

    @app.route("/rollouts")
    def rollouts() -> Response:
        return jsonify(summary_of(environment.stats, totals).document())
