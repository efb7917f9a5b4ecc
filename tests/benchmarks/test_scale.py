"""`make bench-scale` ends with a table of all figures with their bounds, and a last line of JSON."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import loop_gap, scale
from benchmarks.fairness import Fairness
from benchmarks.overload import Overload
from benchmarks.rebalancing import Rebalancing
from tests.paths import REPOSITORY

MEASURED = [
    scale.InFlight(1600.0, 40.0, 0.5),
    scale.SmallRequests(450.0, 10.0, 300.0),
    500.0,
    1900.0,
    Overload(1000, 8000, 0, 12.0, 51.0, 102.0, 0.9, 4.0),
]
"""What the measurements of a service each give, in their order; one and four replicas give turns a second."""


def test_all_figures_are_in_a_table_with_their_bounds_and_in_a_last_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = iter(MEASURED)
    monkeypatch.setattr(scale, "measured", lambda *_: next(rest))
    monkeypatch.setattr(scale, "fairness", lambda *_: Fairness(10.0, 11.0, 1.1, 0.5, 8.0, 16.0))
    monkeypatch.setattr(scale, "rebalancing", lambda *_: Rebalancing(100.0, 400.0, 4.0, 24.9, 25.1))
    monkeypatch.setattr(loop_gap, "measure_all", lambda _: {})
    monkeypatch.setattr(loop_gap, "figures", lambda _: {"loop_gap_cpu_ms": 41.0, "loop_gap_wall_ms": 60.0})
    monkeypatch.setattr(scale, "no_process_left", nullcontext)
    app = typer.Typer()
    app.command()(scale.main)
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, [str(REPOSITORY / "serve_config.scale.yaml"), "--output", str(file)])

    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == figures
    assert figures["four_over_one"] == 3.8
    assert scale.BOUNDS.keys() <= figures.keys()
    rows = {cells[1].strip(): cells for line in result.stderr.splitlines() if len(cells := line.split("│")) == 5}
    assert [rows[name][3].strip() for name in figures] == [scale.BOUNDS.get(name, "") for name in figures]
    assert [float(rows[name][2].replace(",", "")) for name in figures] == [
        pytest.approx(value, abs=0.01) for value in figures.values()
    ]
    assert [f" {part} of 7: " in result.stderr for part in range(1, 8)] == [True] * 7
