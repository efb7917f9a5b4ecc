"""Connects the load test with locust: its events, its shapes, and the tab "Rollouts" of its web interface.

Each process with users counts what they do. Workers send their counts with their reports and the master adds them up.
Exit code and summary come from the process that has all counts.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from flask import Response, jsonify, request
from locust import LoadTestShape, events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from rollout_load.options import DEFAULT_HOST, LoadOptions, add_arguments, load_options, users_at
from rollout_load.outcomes import LoadTotals
from rollout_load.samples import NoSamples
from rollout_load.summary import Summary, add_to_html, broken_limits, line_of, rows_of, summary_of, text_of
from rollout_load.users import POOL, TOTALS, LoadUser

KEY = "rollouts"
"""The counts in a worker's report, and the tab of the web interface."""
DEFAULT_LENGTH_S = 60.0
logger = logging.getLogger(__name__)


def add_tab(environment: Environment, totals: LoadTotals) -> None:
    """Adds the tab and its table to the web interface of `environment`, which has one."""
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


class OptionShape(LoadTestShape):
    """Users by `--shape`; ends the run after `--run-time`."""

    use_common_options = True

    def __init__(self, shape: str, peak: int | None, length_s: float | None) -> None:
        super().__init__()
        self._shape = shape
        self._peak = peak or 1
        self._length_s = length_s or DEFAULT_LENGTH_S

    def tick(self) -> tuple[int, float] | None:
        elapsed = self.get_run_time() / self._length_s
        if elapsed >= 1:
            return None
        return users_at(self._shape, elapsed, self._peak), float(self._peak)


def options_of(environment: Environment) -> LoadOptions:
    assert environment.parsed_options is not None
    return load_options(environment.parsed_options)


def prepare(environment: Environment, **_: Any) -> None:
    """Chooses classes and shape, unless a master does."""
    if isinstance(environment.runner, WorkerRunner):
        return
    given = environment.parsed_options
    assert given is not None
    options = options_of(environment)
    if "pusher" in options.classes and not options.push_weights:
        raise SystemExit("The class pusher needs weights to push: --push-weights FILE_OR_FOLDER")
    # Classes that are named on locust's own command line stay as they are.
    if not given.user_classes:
        users = [each for each in environment.user_classes if issubclass(each, LoadUser)]
        environment.user_classes = [each for each in users if each.kind in options.classes]
        for each in users:
            each.weight = options.classes.get(each.kind, 0)
    if options.shape != "constant":
        environment.shape_class = OptionShape(options.shape, given.num_users, given.run_time)
        environment.shape_class.runner = environment.runner
    if environment.web_ui is not None:
        add_tab(environment, TOTALS)


def begin(environment: Environment, **_: Any) -> None:
    TOTALS.clear()
    if isinstance(environment.runner, MasterRunner):
        return
    try:
        POOL.fill(environment.host or DEFAULT_HOST, options_of(environment))
    except NoSamples as error:
        # `runner.quit()` would leave locust running until its run time is over.
        raise SystemExit(f"No samples, no test: {error}") from error


def report(data: dict[str, Any], **_: Any) -> None:
    data[KEY] = TOTALS.message()
    TOTALS.clear()


def take_report(data: dict[str, Any], **_: Any) -> None:
    if KEY in data:
        TOTALS.merge(LoadTotals.of_message(data[KEY]))


def end(environment: Environment, **_: Any) -> None:
    """Sets the exit code, and has the summary printed after locust's own."""
    if isinstance(environment.runner, WorkerRunner):
        return

    def measured() -> tuple[Summary, list[str]]:
        summary = summary_of(environment.stats, TOTALS)
        return summary, broken_limits(summary, options_of(environment).limits)

    def show(exit_code: int, **_: Any) -> None:
        # Measured anew: requests have ended since the exit code was set.
        summary, broken = measured()
        html = environment.parsed_options and environment.parsed_options.html_file
        if html and Path(html).exists():
            add_to_html(Path(html), summary, broken)
        sys.stdout.write(f"{text_of(summary, broken)}\n{line_of(summary, broken, exit_code)}\n")
        sys.stdout.flush()

    broken = measured()[1]
    for sentence in broken:
        logger.error(sentence)
    environment.process_exit_code = 1 if broken else 0
    environment.events.quit.add_listener(show)


def connect() -> None:
    """Called once, by the locustfile."""
    events.init_command_line_parser.add_listener(add_arguments)
    events.init.add_listener(prepare)
    events.test_start.add_listener(begin)
    events.report_to_master.add_listener(report)
    events.worker_report.add_listener(take_report)
    events.quitting.add_listener(end)
