"""Which problems of a target are kept."""

from tests.endurance.fuzz.tally import MOST_PROBLEMS, Tally


def test_a_target_keeps_its_first_problems_only() -> None:
    tally = Tally()
    for number in range(2 * MOST_PROBLEMS):
        tally.add(Tally(1, [f"problem {number}"]))
    assert (tally.cases, len(tally.problems), tally.problems[0]) == (2 * MOST_PROBLEMS, MOST_PROBLEMS, "problem 0")
