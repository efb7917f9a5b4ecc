"""Cases that count over several runs."""

from dataclasses import replace
from pathlib import Path

from tests.endurance.fuzz.__main__ import Target, missing
from tests.endurance.fuzz.results import Portion, counted, problems_of, totals
from tests.endurance.fuzz.tally import Tally
from tests.endurance.result_lines import append, read

INFO = Portion("GET /v1/info", 1500, [], loop_gap_ms=3.0, seconds=20.0, commit="daf3695")
BAD = replace(INFO, problems=["status 500", "a path"])


def target(cases: int) -> Target:
    return Target(INFO.target, cases, lambda numbers: Tally(len(numbers)), portion=1500)


def test_a_run_goes_on_where_the_last_one_ended() -> None:
    assert missing(target(3100), []) == range(1500)
    assert missing(target(3100), [INFO]) == range(1500, 3000)
    assert missing(target(3100), [INFO, INFO]) == range(3000, 3100)
    assert missing(target(3000), [INFO, INFO]) == range(3000, 3000)


def test_a_target_that_had_problems_begins_anew() -> None:
    assert missing(target(3000), [INFO, BAD]) == range(1500)
    assert counted([INFO, BAD]) == {INFO.target: [INFO, BAD]}
    assert counted([INFO, BAD, INFO]) == {INFO.target: [INFO]}


def test_problems_are_those_of_portions_that_count() -> None:
    score = replace(INFO, target="POST /v1/score")
    assert problems_of(counted([BAD, score])) == ["GET /v1/info: status 500", "GET /v1/info: a path"]
    assert problems_of(counted([BAD, score, INFO])) == []


def test_portions_of_several_runs_come_to_cases_and_longest_gaps(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.jsonl"
    assert totals(counted(read(file, Portion))) == {
        "cases": {},
        "loop_gaps_ms": {},
        "loop_gap_ms": 0.0,
        "fewest_cases": 0,
        "all_cases": 0,
    }
    for portion in (INFO, replace(INFO, target="DELETE /v1/jobs", cases=7), replace(INFO, cases=1600, loop_gap_ms=4.5)):
        append(file, portion)
    assert totals(counted(read(file, Portion))) == {
        "cases": {"DELETE /v1/jobs": 7, "GET /v1/info": 3100},
        "loop_gaps_ms": {"DELETE /v1/jobs": 3.0, "GET /v1/info": 4.5},
        "loop_gap_ms": 4.5,
        "fewest_cases": 7,
        "all_cases": 3107,
    }
