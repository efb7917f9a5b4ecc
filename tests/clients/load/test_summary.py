"""The end of a load test: numbers, bounds, text, JSON and HTML."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rollout_load.options import LoadLimits
from rollout_load.outcomes import LoadTotals
from rollout_load.summary import (
    Latency,
    Summary,
    add_to_html,
    broken_limits,
    entry_name,
    kind_of_entry,
    line_of,
    text_of,
)

TOTALS = LoadTotals(40, 100, 1000, 0, Counter({"completed": 39}), Counter({"overloaded": 1}))
SUMMARY = Summary(
    seconds=10.0,
    entries={
        "/rollout (interactive)": Latency(requests=90, failed=0, p50_s=0.1, p95_s=1.0),
        "/rollout (groups)": Latency(requests=10, failed=1, p50_s=2.0, p95_s=8.0),
    },
    first=Latency(requests=10, failed=0, p50_s=0.2, p95_s=0.4),
    totals=TOTALS,
)
KEPT = LoadLimits(max_error_rate=0.01, max_p95_s={"": 8.0, "interactive": 1.0, "first": 0.4})


def test_bounds_that_are_just_kept_are_kept() -> None:
    assert broken_limits(SUMMARY, KEPT) == []
    assert broken_limits(SUMMARY, LoadLimits(min_tokens_per_s=100.0, min_turns_per_s=10.0)) == []


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (LoadLimits(max_error_rate=0.0), "1.00% of the requests failed; 0.00% may."),
        (LoadLimits(min_tokens_per_s=100.5), "There were 100.0 tokens a second; 100.5 are wanted."),
        (LoadLimits(min_turns_per_s=11), "There were 10.0 turns a second; 11 are wanted."),
        (LoadLimits(max_p95_s={"": 7.5}), "/rollout (groups): the p95 is 8.000 s; 7.5 s are allowed."),
        (
            LoadLimits(max_p95_s={"": 9.0, "interactive": 0.5}),
            "/rollout (interactive): the p95 is 1.000 s; 0.5 s are allowed.",
        ),
        (
            LoadLimits(max_p95_s={"first": 0.3}),
            "The first finished rollout of a stream: the p95 is 0.400 s; 0.3 s are allowed.",
        ),
    ],
)
def test_a_bound_that_is_not_kept_is_a_sentence(limits: LoadLimits, sentence: str) -> None:
    assert broken_limits(SUMMARY, limits) == [sentence]


def test_a_run_without_an_answer_has_failed_whatever_the_bounds_are() -> None:
    assert broken_limits(Summary(0.0, {}, None, LoadTotals()), LoadLimits(max_error_rate=1.0)) == [
        "No request was answered."
    ]


def test_an_entry_tells_its_class() -> None:
    assert kind_of_entry(entry_name("/v1/sessions/{id}", "agent")) == "agent"


def test_the_last_line_is_json() -> None:
    line = json.loads(line_of(SUMMARY, ["Too slow."], 1))
    assert (line["broken"], line["exit_code"]) == (["Too slow."], 1)
    assert (line["requests"], line["failed"], line["error_rate"]) == (100, 1, 0.01)
    assert (line["rollouts_per_s"], line["turns_per_s"], line["tokens_per_s"]) == (4.0, 10.0, 100.0)
    assert line["errors"] == {"overloaded": 1}
    assert line["latency"]["/rollout (groups)"] == {"requests": 10, "failed": 1, "p50_s": 2.0, "p95_s": 8.0}
    assert line["first_rollout"]["p95_s"] == 0.4


def test_the_text_has_what_the_tables_of_locust_do_not_have() -> None:
    assert text_of(SUMMARY, ["Too slow."]).splitlines() == [
        "Rollouts          40, 4.0 a second",
        "Statuses          completed 39",
        "Turns a second    10.0",
        "Tokens a second   100.0",
        "Errors by kind    overloaded 1",
        "First rollout     p50 0.20 s, p95 0.40 s",
        "Not kept          Too slow.",
    ]


def test_the_html_report_gets_the_same_rows(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("<html><body><div></div></body></html>")
    add_to_html(page, SUMMARY, ["1 < 2"])
    html = page.read_text()
    assert "<td>100.0</td>" in html
    assert "<td>1 &lt; 2</td>" in html
    assert html.endswith("</section></body></html>")
