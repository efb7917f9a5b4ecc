"""Connects the load test with locust: its events, its shapes, and the tab "Rollouts" of its web interface.

One process of its own, or a master and its workers: each process that has users counts what they do; a worker sends
what it has counted with its reports, the master sums it up. Exit code and summary are those of the process that has
all of it.
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


DEFAULT_LENGTH_S = 60.0


class OptionShape(LoadTestShape):
    """Ends the run with `--run-time`."""

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


logger = logging.getLogger(__name__)
REPORT_KEY = "rollouts"


def options_of(environment: Environment) -> LoadOptions:
    assert environment.parsed_options is not None
    return load_options(environment.parsed_options)


def prepare(environment: Environment, **_: Any) -> None:
    """Chooses classes and shape, where no master does."""
    if isinstance(environment.runner, WorkerRunner):
        return
    given = environment.parsed_options
    assert given is not None
    options = options_of(environment)
    if "pusher" in options.classes and not options.push_weights:
        raise SystemExit("The class pusher needs weights to push: --push-weights FILE_OR_FOLDER")
    # Classes that locust's own command line names are taken as they are.
    if not given.user_classes:
        choose_users(environment, options)
    if options.shape != "constant":
        environment.shape_class = OptionShape(options.shape, given.num_users, given.run_time)
        environment.shape_class.runner = environment.runner
    if environment.web_ui is not None:
        add_tab(environment, TOTALS)


def choose_users(environment: Environment, options: LoadOptions) -> None:
    """Leaves the classes of `--classes`, with their shares."""
    chosen = [each for each in environment.user_classes if issubclass(each, LoadUser) and each.kind in options.classes]
    for each in chosen:
        each.weight = options.classes[each.kind]
    environment.user_classes = [*chosen]


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
    data[REPORT_KEY] = TOTALS.message()
    TOTALS.clear()


def take_report(data: dict[str, Any], **_: Any) -> None:
    if REPORT_KEY in data:
        TOTALS.merge(LoadTotals.of_message(data[REPORT_KEY]))


class Ending:
    """Exit code, then the summary after locust's own."""

    def __init__(self) -> None:
        self._environment: Environment | None = None

    def decide(self, environment: Environment, **_: Any) -> None:
        if isinstance(environment.runner, WorkerRunner):
            return
        self._environment = environment
        broken = self._broken(self._summary(environment), environment)
        for sentence in broken:
            logger.error(sentence)
        environment.process_exit_code = 1 if broken else 0

    def show(self, exit_code: int, **_: Any) -> None:
        environment = self._environment
        if environment is None:
            return
        summary = self._summary(environment)
        broken = self._broken(summary, environment)
        html = environment.parsed_options and environment.parsed_options.html_file
        if html and Path(html).exists():
            add_to_html(Path(html), summary, broken)
        sys.stdout.write(f"{text_of(summary, broken)}\n{line_of(summary, broken, exit_code)}\n")
        sys.stdout.flush()

    def _summary(self, environment: Environment) -> Summary:
        return summary_of(environment.stats, TOTALS)

    def _broken(self, summary: Summary, environment: Environment) -> list[str]:
        return broken_limits(summary, options_of(environment).limits)


def connect() -> None:
    """Called once, by the locustfile."""
    ending = Ending()
    events.init_command_line_parser.add_listener(add_arguments)
    events.init.add_listener(prepare)
    events.test_start.add_listener(begin)
    events.report_to_master.add_listener(report)
    events.worker_report.add_listener(take_report)
    events.quitting.add_listener(ending.decide)
    events.quit.add_listener(ending.show)
