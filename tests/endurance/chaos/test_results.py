"""What rounds of chaos come to, over several runs."""

import json
from dataclasses import replace
from pathlib import Path

from tests.endurance.chaos.results import Round, by_kind
from tests.endurance.result_lines import append, read

GOOD = Round("proxy", 256, 1.0, 17, 9.5, 4.0, lost=0, twice=0, changed=0, posted_again=3, errors=[])


def test_a_round_in_which_everything_came_back_once_and_unchanged_has_no_problems() -> None:
    assert GOOD.problems() == []


def test_each_thing_that_does_not_hold_is_named() -> None:
    bad = replace(
        GOOD, lost=1, twice=2, changed=3, recovered_after_s=None, errors=["ServiceFailed: no"], most_turns_again=2
    )
    assert bad.problems() == [
        "proxy: 1 of 256 rollouts lost",
        "proxy: 2 of 256 rollouts twice",
        "proxy: 3 of 256 rollouts changed",
        "proxy: 2 turns of one rollout were done twice",
        "proxy: what was struck was not replaced in time",
        "proxy: ServiceFailed: no",
    ]


def test_rounds_of_several_runs_are_counted_by_kind(tmp_path: Path) -> None:
    file = tmp_path / "chaos.jsonl"
    assert by_kind(read(file, Round)) == {}
    ingress = replace(GOOD, kind="ingress", turns_again=5, most_turns_again=1)
    later = replace(GOOD, seconds=12.34, recovered_after_s=None)
    for finished in (GOOD, ingress, later):
        append(file, finished)
    assert read(file, Round) == [GOOD, ingress, later]
    assert by_kind(read(file, Round)) == {
        "ingress": {
            "rounds": 1,
            "rounds_with_problems": 0,
            "lost": 0,
            "twice": 0,
            "changed": 0,
            "posted_again": 3,
            "turns_again": 5,
            "most_turns_again": 1,
            "longest_s": 9.5,
            "longest_recovery_s": 4.0,
        },
        "proxy": {
            "rounds": 2,
            "rounds_with_problems": 1,
            "lost": 0,
            "twice": 0,
            "changed": 0,
            "posted_again": 6,
            "turns_again": 0,
            "most_turns_again": 0,
            "longest_s": 12.3,
            "longest_recovery_s": 4.0,
        },
    }


def test_rounds_of_older_files_do_not_know_which_turns_were_done_again(tmp_path: Path) -> None:
    file = tmp_path / "chaos.jsonl"
    append(file, GOOD)
    known = json.loads(file.read_text())
    del known["turns_again"], known["most_turns_again"]
    file.write_text(json.dumps(known))
    assert read(file, Round) == [GOOD]
