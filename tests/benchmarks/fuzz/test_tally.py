"""Cases that count over several runs."""

from pathlib import Path

from benchmarks.fuzz.tally import MOST_PROBLEMS, Tallies, Tally


def test_cases_of_earlier_runs_count(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = Tallies(file)
    assert first.missing("GET /v1/info", 3000) == 3000
    first.add("GET /v1/info", Tally(1200, loop_gap_ms=3.0))
    second = Tallies(file)
    assert second.missing("GET /v1/info", 3000) == 1800
    second.add("GET /v1/info", Tally(1900, loop_gap_ms=2.0))
    assert Tallies(file).by_target == {"GET /v1/info": Tally(3100, loop_gap_ms=3.0)}
    assert Tallies(file).missing("GET /v1/info", 3000) == 0


def test_a_target_that_had_problems_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = Tallies(file)
    first.add("GET /v1/info", Tally(3000, ["status 500", "a path"]))
    assert first.problems() == ["GET /v1/info: status 500", "GET /v1/info: a path"]
    assert (Tallies(file).problems(), Tallies(file).missing("GET /v1/info", 3000)) == ([], 3000)


def test_a_target_keeps_its_first_problems_only() -> None:
    tally = Tally()
    for number in range(2 * MOST_PROBLEMS):
        tally.add(Tally(1, [f"problem {number}"]))
    assert (tally.cases, len(tally.problems), tally.problems[0]) == (2 * MOST_PROBLEMS, MOST_PROBLEMS, "problem 0")
