"""The summary of a run for people (text, a table in locust's HTML report) and for programs (a line of JSON)."""

import json
from html import escape
from pathlib import Path

from rollout_load.summary import Summary

WIDTH = 18


def rows_of(summary: Summary) -> list[tuple[str, str]]:
    """What locust's own tables do not show: name and value."""
    totals = summary.totals
    rows = [
        ("Rollouts", f"{totals.rollouts}, {summary.rate(totals.rollouts):.1f} a second"),
        ("Statuses", counts(totals.statuses)),
        ("Turns a second", f"{summary.turns_per_s:.1f}"),
        ("Tokens a second", f"{summary.tokens_per_s:.1f}"),
        ("Errors by kind", counts(totals.errors)),
    ]
    if summary.first is not None:
        rows.append(("First rollout", f"p50 {summary.first.p50_s:.2f} s, p95 {summary.first.p95_s:.2f} s"))
    if totals.pushes:
        rows.append(("Pushes", str(totals.pushes)))
    if (held := totals.last_quarter_over_first()) is not None:
        rows.append(("Held", f"the last quarter had {held:.2f} of the tokens of the first"))
    return rows


def counts(by_name: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(by_name.items())) or "none"


def text_of(summary: Summary, broken: list[str]) -> str:
    rows = rows_of(summary) + [("Not kept", sentence) for sentence in broken]
    return "".join(f"{name:<{WIDTH}}{value}\n" for name, value in rows)


def line_of(summary: Summary, broken: list[str], exit_code: int) -> str:
    return json.dumps(summary.document() | {"broken": broken, "exit_code": exit_code})


def add_to_html(path: Path, summary: Summary, broken: list[str]) -> None:
    """Adds the rows to the report that locust has written."""
    rows = rows_of(summary) + [("Not kept", sentence) for sentence in broken]
    cells = "".join(f"<tr><th align='left'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    table = f"<section style='padding: 2em; font-family: sans-serif'><h2>Rollouts</h2><table>{cells}</table></section>"
    html = path.read_text(encoding="utf-8")
    head, body, tail = html.rpartition("</body>")
    path.write_text(f"{head}{table}{body}{tail}" if body else f"{html}{table}", encoding="utf-8")
