"""The picture of the dashboard: which panels, their queries, legends and lines."""

from pathlib import Path

import pytest

from examples.pictures.dashboard import DRAWN, RATE_INTERVAL_S, Panel, draw, legend_of, panels
from examples.pictures.prometheus import Line, line_of


def test_each_drawn_panel_is_one_of_the_dashboard_with_its_query() -> None:
    found = panels()
    assert len(found) == len(DRAWN) == 12
    ended = found[0]
    assert (ended.title, ended.unit) == ("Rollouts ended", "ops")
    assert ended.targets == [
        (
            f"sum by (task_name, status) (rate(ray_rollout_rollouts_total[{RATE_INTERVAL_S}s]))",
            "{{task_name}} {{status}}",
        )
    ]
    assert not any("$" in query for panel in found for query, _ in panel.targets)


def test_a_legend_has_the_values_of_its_labels() -> None:
    labels = {"task_name": "math", "status": "completed"}
    assert legend_of("{{task_name}} {{status}}", labels) == "math completed"
    assert legend_of("{{task_name}} 95 %", labels) == "math 95 %"
    assert legend_of("{{policy}}", labels) == ""


def test_a_line_has_the_times_and_values_that_prometheus_answers() -> None:
    answered = {"metric": {"task_name": "math"}, "values": [[10, "1.5"], [11, "NaN"]]}
    line = line_of(answered)
    assert (line.labels, line.times_s, line.values[0]) == ({"task_name": "math"}, [10.0, 11.0], 1.5)
    assert line.values[1] != line.values[1]


@pytest.mark.slow
def test_panels_without_lines_are_drawn_too(tmp_path: Path) -> None:
    panel = Panel("Requests", "reqps", [])
    lines = [("/rollout 200", Line({}, [0.0, 1.0], [1.0, 2.0]))]
    draw([(panel, lines), (Panel("Staleness, 95 %", "none", []), [])], tmp_path / "dashboard.svg")
    text = (tmp_path / "dashboard.svg").read_text()
    assert [title for title in ("Requests", "/rollout 200", "Staleness, 95 %", "a second") if title not in text] == []
