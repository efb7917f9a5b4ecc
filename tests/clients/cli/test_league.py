"""Leagues: ratings that are known, intervals that hold them, and which games are posted for them."""

import json
import random
from math import exp, log10
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.cli.commands.league import PlayedGame, demand_of, fitted, in_seats, ratings_of, score_of
from tests.clients.cli.command_line import rollout as command
from tests.clients.cli.command_line import rows_of
from tests.clients.message_logs import generated, rollout
from tests.clients.scripted_service import SUMMARY, Json, ScriptedService, ndjson, results_of

SCORES = st.sampled_from([0.0, 0.5, 1.0])
NAMES = ["a", "b", "c"]
GAMES = st.lists(
    st.builds(PlayedGame, st.just("a"), st.sampled_from(["b", "c"]), SCORES)
    | st.builds(PlayedGame, st.just("b"), st.just("c"), SCORES),
    max_size=30,
)


def by_name(games: list[PlayedGame], names: list[str] = NAMES) -> dict[str, Any]:
    return {rating.policy: rating for rating in ratings_of(games, names, 0.95)}


def test_three_wins_of_four_are_the_elo_of_the_odds_with_one_draw_in_advance() -> None:
    games = [PlayedGame("a", "b", score) for score in (1.0, 1.0, 0.0, 1.0)]
    found = by_name(games, ["a", "b"])
    assert found["a"].elo - found["b"].elo == pytest.approx(400 * log10(3.5 / 1.5))
    assert found["a"].elo + found["b"].elo == pytest.approx(2000)
    assert (found["a"].won, found["a"].drawn, found["a"].lost) == (3, 0, 1)
    assert (found["b"].won, found["b"].drawn, found["b"].lost) == (1, 0, 3)


def test_without_games_all_are_equal_and_nothing_is_known() -> None:
    found = by_name([])
    assert [rating.elo for rating in found.values()] == [pytest.approx(1000)] * 3
    assert all(rating.high - rating.low > 600 for rating in found.values())


def test_one_that_always_wins_has_a_rating_and_an_interval() -> None:
    found = by_name([PlayedGame("a", "b", 1.0)] * 64, ["a", "b"])
    assert found["a"].elo - found["b"].elo == pytest.approx(400 * log10(64.5 / 0.5))
    assert found["a"].low < found["a"].elo < found["a"].high < found["a"].elo + 400


@given(GAMES)
def test_ratings_have_a_fixed_mean_and_do_not_depend_on_the_order_of_the_games(games: list[PlayedGame]) -> None:
    found, again = by_name(games), by_name(games[::-1])
    assert sum(rating.elo for rating in found.values()) == pytest.approx(3000)
    for name in NAMES:
        assert found[name].elo == pytest.approx(again[name].elo, abs=1e-4)
        assert found[name].low < found[name].elo < found[name].high


@given(st.lists(st.lists(st.sampled_from([0, 1, 40, 2000]), min_size=5, max_size=5), min_size=5, max_size=5))
def test_the_ratings_expect_the_points_that_were_made(wins: list[list[int]]) -> None:
    points = [2.0 + sum(row[:place] + row[place + 1 :]) for place, row in enumerate(wins)]
    counts = [[(1.0 + wins[one][other] + wins[other][one]) * (one != other) for other in range(5)] for one in range(5)]
    logits, _ = fitted(points, counts)
    for one in range(5):
        expected = sum(counts[one][other] / (1 + exp(logits[other] - logits[one])) for other in range(5))
        assert expected == pytest.approx(points[one], abs=1e-4)


@given(GAMES)
def test_a_further_win_raises_the_winner_over_the_loser(games: list[PlayedGame]) -> None:
    before, after = by_name(games), by_name([*games, PlayedGame("a", "b", 1.0)])
    assert after["a"].elo - after["b"].elo > before["a"].elo - before["b"].elo


def test_the_intervals_hold_the_ratings_that_made_the_games_as_often_as_they_say() -> None:
    draw, true = random.Random(0), {"a": 1150.0, "b": 1000.0, "c": 850.0}
    held = total = 0
    for _ in range(200):
        games = [
            PlayedGame(one, other, float(draw.random() < 1 / (1 + 10 ** ((true[other] - true[one]) / 400))))
            for one in NAMES
            for other in NAMES
            if one != other
            for _ in range(30)
        ]
        for rating in ratings_of(games, NAMES, 0.9):
            held, total = held + (rating.low <= true[rating.policy] <= rating.high), total + 1
    assert 0.86 < held / total < 0.95


@pytest.mark.parametrize(
    ("name", "demand"),
    [
        ("current", {}),
        ("7", {"version": 7}),
        ("run-b", {"name": "run-b"}),
        ("run-b/7", {"name": "run-b", "version": 7}),
    ],
)
def test_a_contestant_is_a_policy_a_version_or_both(name: str, demand: dict[str, Any]) -> None:
    assert demand_of(name) == demand
    sample = in_seats({"task_name": "nim", "extra_env_info": {"seed": 4}}, name)
    rival = {"policy": demand.get("name"), "version": demand.get("version")}
    assert sample["extra_env_info"] == {"seed": 4, "seats": {"0": "policy", "1": rival}}


def game_of(*rewards: float) -> Any:
    played = rollout(generated(1))
    played.metrics.environment = {f"seat_{seat}_reward": reward for seat, reward in enumerate(rewards)}
    return played


def test_the_seat_with_the_higher_reward_has_won() -> None:
    assert [score_of(game_of(*rewards)) for rewards in ((1, -1), (0, 0), (-1, 1), (0.5, 0.25))] == [1, 0.5, 0, 1]
    for wrong in ((), (1,), (1, 0, 0)):
        with pytest.raises(ValueError, match="is no game of two seats"):
            score_of(game_of(*wrong))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nim", "--league", "current"), "name at least two policies"),
        (("nim", "--league", "a", "--league", "a"), "each of them once"),
        (("--league", "a", "--league", "b"), "plays one task"),
        (("nim", "--league", "a", "--league", "b", "--k", "1"), "leave out --k"),
        (("nim", "--league", "a", "--league", "b", "--policy-name", "c"), "leave out --policy-name"),
    ],
)
def test_what_a_league_cannot_be_played_with_is_refused(
    service: ScriptedService, arguments: tuple[str, ...], says: str
) -> None:
    done = command(service, "eval", *arguments, columns=300)
    assert (done.exit_code, says in " ".join(done.output.split())) == (1, True)


def test_each_pair_plays_each_sample_in_both_orders(service: ScriptedService) -> None:
    strength = {None: 2, "run-b": 1, "run-c": 0}

    def the_stronger_wins(body: Json) -> Any:
        own = strength[body.get("policy", {}).get("name")]
        played = results_of(body)
        for each, sample in zip(played, body["samples"], strict=True):
            won = own > strength[sample["extra_env_info"]["seats"]["1"]["policy"]]
            each["metrics"]["environment"] = {"seat_0_reward": float(won), "seat_1_reward": float(not won)}
        return ndjson(*({"position": place, "sample": each} for place, each in enumerate(played)), {"summary": SUMMARY})

    contestants = ["--league", "run-c", "--league", "current", "--league", "run-b/7"]
    service.rollouts.extend([the_stronger_wins] * 3)
    done = command(service, "eval", "math", *contestants, "--count", "2", "--json")
    assert done.exit_code == 0, done.stderr
    seated = [
        (body.get("policy", {}), [sample["extra_env_info"]["seats"]["1"] for sample in body["samples"]])
        for body in service.bodies
    ]
    current, b, c = (
        {"policy": name, "version": version} for name, version in ((None, None), ("run-b", 7), ("run-c", None))
    )
    assert seated == [
        ({"name": "run-c"}, [current, current, b, b]),
        ({}, [c, c, b, b]),
        ({"name": "run-b", "version": 7}, [c, c, current, current]),
    ]
    document = json.loads(done.stdout)
    assert [(row["policy"], row["won"], row["drawn"], row["lost"]) for row in document["league"]] == [
        ("current", 8, 0, 0),
        ("run-b/7", 4, 0, 4),
        ("run-c", 0, 0, 8),
    ]
    assert (document["games"], document["first_seat"]) == (12, 0.5)
    service.rollouts.extend([the_stronger_wins] * 3)
    table = command(service, "eval", "math", *contestants, "--count", "2").stdout
    assert [row[0] for row in rows_of(table)[:3]] == ["current", "run-b/7", "run-c"]
