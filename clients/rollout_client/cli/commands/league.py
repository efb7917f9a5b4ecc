"""`rollout eval --league`: Elo of policies that play a game of two seats against each other, with intervals.

The ratings are those of the Bradley-Terry model, in which the chances of two policies are as 10^(Elo / 400); a draw is
half a win for both. Each pair is given one drawn game in advance, so that a policy that always wins has a rating too:
the ratings are the mode of that posterior. The interval is normal, with the curvature at the mode. Games with draws
vary less than the model says, so that it is wide rather than narrow where games are independent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Any, cast

from rich.table import Table

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.options import Connection
from rollout_client.cli.output import plain
from rollout_client.cli.run.player import RunPlayer, play_in_memory
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import final_reward

MEAN_ELO = 1000.0
ELO_PER_LOGIT = 400 / log(10)
DRAWS_BEFORE = 1.0
"""Drawn games that each pair is given in advance."""
MOST_STEPS, EXACT_ENOUGH = 200, 1e-10
CURRENT = "current"
FIRST, SECOND = "seat_0_reward", "seat_1_reward"


@dataclass(frozen=True, slots=True)
class PlayedGame:
    first: str
    """The policy in seat 0."""
    second: str
    score: float
    """Points of `first`: 1 for a win, 0.5 for a draw, 0 for a loss."""


@dataclass(frozen=True, slots=True)
class Rating:
    policy: str
    elo: float
    """With a mean of 1000 over the league."""
    low: float
    high: float
    """Ends of the interval."""
    won: int
    drawn: int
    lost: int


def refuse_beside_a_league(
    contestants: Sequence[str], tasks: Sequence[str], options: RolloutOptions, given: Mapping[str, Any]
) -> None:
    """Raises `ValueError` for what a league cannot be played with.

    Args:
        given: other options of the command, by their names; `None` where they were not given.
    """
    if len({*contestants}) < max(len(contestants), 2):
        raise ValueError(f"--league {', '.join(contestants)}: name at least two policies, each of them once.")
    if len(tasks) != 1:
        raise ValueError("--league plays one task, a game of two seats: name it.")
    beside = [name for name, value in given.items() if value]
    if options.get("policy"):
        beside.append("--policy-name and its like")
    if beside:
        raise ValueError(f"--league names the policies and counts games: leave out {', '.join(beside)}.")


def demand_of(contestant: str) -> dict[str, Any]:
    """The weights that a name of `--league` stands for: `current`, `7`, `run-b` or `run-b/7`."""
    if contestant == CURRENT:
        return {}
    name, _, number = contestant.rpartition("/")
    if not number.isdecimal():
        return {"name": contestant}
    return {**({"name": name} if name else {}), "version": int(number)}


def play_league(
    service: Connection,
    samples: Sequence[Mapping[str, Any]],
    contestants: Sequence[str],
    options: RolloutOptions,
    chunk_size: int,
    totals: Totals,
) -> list[PlayedGame]:
    """Plays each sample with each pair of contestants, in both orders.

    Raises:
        ValueError: the task is no game of two seats; and what a request raises.
    """
    games: list[PlayedGame] = []
    for first in contestants:
        others = [second for second in contestants if second != first]
        posted = [in_seats(sample, second) for second in others for sample in samples]
        played = cast(RolloutOptions, {**options, "policy": demand_of(first)})
        groups: dict[int, list[SampleResult]] = {}
        play_in_memory(RunPlayer(service, posted, played, chunk_size), totals, groups)
        for row, group in sorted(groups.items()):
            second = others[row // len(samples)]
            games += [PlayedGame(first, second, score_of(game)) for game in group if final_reward(game) is not None]
    return games


def in_seats(sample: Mapping[str, Any], second: str) -> dict[str, Any]:
    """The sample with the policy of the request in seat 0, and `second` in seat 1."""
    demand = demand_of(second)
    rival = {"policy": demand.get("name"), "version": demand.get("version")}
    return {**sample, "extra_env_info": {**(sample.get("extra_env_info") or {}), "seats": {"0": "policy", "1": rival}}}


def score_of(game: SampleResult) -> float:
    """Points of seat 0. Raises `ValueError` if the rollout is no game of two seats."""
    found = game.metrics.environment
    if FIRST not in found or SECOND not in found or "seat_2_reward" in found:
        raise ValueError(f"The task {game.task_name} is no game of two seats: a league needs one.")
    return 0.5 * (1 + (found[FIRST] > found[SECOND]) - (found[FIRST] < found[SECOND]))


def ratings_of(games: Sequence[PlayedGame], contestants: Sequence[str], confidence: float) -> list[Rating]:
    """The ratings of all contestants, best first.

    Args:
        confidence: the level of the intervals, between 0 and 1.
    """
    place = {name: number for number, name in enumerate(contestants)}
    size = len(contestants)
    points = [DRAWS_BEFORE * (size - 1) / 2] * size
    counts = [[DRAWS_BEFORE * (one != other) for other in range(size)] for one in range(size)]
    tally = {name: {0.0: 0, 0.5: 0, 1.0: 0} for name in contestants}
    for game in games:
        for name, other, score in ((game.first, game.second, game.score), (game.second, game.first, 1 - game.score)):
            points[place[name]] += score
            counts[place[name]][place[other]] += 1
            tally[name][score] += 1
    logits, covariance = fitted(points, counts)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rated = []
    for name, number in place.items():
        elo, half = MEAN_ELO + ELO_PER_LOGIT * logits[number], ELO_PER_LOGIT * z * sqrt(covariance[number][number])
        won, drawn, lost = tally[name][1.0], tally[name][0.5], tally[name][0.0]
        rated.append(Rating(name, elo, elo - half, elo + half, won, drawn, lost))
    return sorted(rated, key=lambda rating: -rating.elo)


def fitted(points: Sequence[float], counts: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """The most likely strengths with a mean of 0, in logits, and their covariance; by Newton's method.

    Args:
        points: points of each contestant, draws as 0.5.
        counts: games of each pair, symmetric.
    """
    everyone = range(len(points))
    logits = [0.0] * len(points)
    for _ in range(MOST_STEPS):
        chances = [[1 / (1 + exp(logits[other] - logits[one])) for other in everyone] for one in everyone]
        excess = [points[one] - sum(counts[one][other] * chances[one][other] for other in everyone) for one in everyone]
        covariance = pseudo_inverse(
            [[counts[one][other] * chances[one][other] * chances[other][one] for other in everyone] for one in everyone]
        )
        steps = [sum(covariance[one][other] * excess[other] for other in everyone) for one in everyone]
        logits = [logit + step for logit, step in zip(logits, steps, strict=True)]
        if max(map(abs, steps)) < EXACT_ENOUGH:
            break
    return logits, covariance


def pseudo_inverse(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """The pseudo-inverse of the Laplacian of a connected graph with these weights, whose rows sum to 0."""
    size = len(weights)
    shift = 1 / size
    rows = [
        [sum(weights[one]) - weights[one][one] if one == other else -weights[one][other] for other in range(size)]
        for one in range(size)
    ]
    # With the mean added, the Laplacian is positive definite.
    wide = [
        [*(value + shift for value in row), *(float(one == other) for other in range(size))]
        for one, row in enumerate(rows)
    ]
    for pivot in range(size):
        factor = wide[pivot][pivot]
        wide[pivot] = [value / factor for value in wide[pivot]]
        for one in range(size):
            if one != pivot and (times := wide[one][pivot]):
                wide[one] = [value - times * base for value, base in zip(wide[one], wide[pivot], strict=True)]
    return [[value - shift for value in row[size:]] for row in wide]


def league_document(ratings: Sequence[Rating], games: Sequence[PlayedGame], confidence: float) -> dict[str, Any]:
    """The league as JSON. `first_seat` is the share of points that went to seat 0."""
    return {
        "league": list(map(asdict, ratings)),
        "games": len(games),
        "first_seat": sum(game.score for game in games) / len(games) if games else None,
        "confidence": confidence,
    }


def league_table(ratings: Sequence[Rating], games: Sequence[PlayedGame], confidence: float) -> Table:
    table = Table(title=f"Elo of {len(games)} games, {confidence:.0%} intervals", title_justify="left")
    for name in ("policy", "Elo", "low", "high", "won", "drawn", "lost"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for rating in ratings:
        numbers = (f"{value:.0f}" for value in (rating.elo, rating.low, rating.high))
        table.add_row(plain(rating.policy), *numbers, *map(str, (rating.won, rating.drawn, rating.lost)))
    return table
