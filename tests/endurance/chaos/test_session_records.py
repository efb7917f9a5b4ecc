"""What chaos says of records of sessions that are not what their agents were answered."""

from rollout_client.contract.messages import Message
from tests.endurance.chaos.sessions.records import Answered, answered, problems_of, responses_in
from tests.endurance.chaos.sessions.results import SessionRound, by_kind

FIRST, SECOND = ((1, 2), (3,)), ((1, 2, 3, 4), (5, 6))


def test_the_file_of_an_agent_that_was_killed_ends_anywhere() -> None:
    said = answered('{"prompt": [1, 2], "response": [3]}\nnull\n{"prompt": [1, 2, 3')
    assert said == Answered([FIRST], broken=2)


def test_each_answer_is_recorded_once_and_beside_them_only_what_broke() -> None:
    said = Answered([FIRST, SECOND], broken=1)
    assert problems_of("s", said, [SECOND, FIRST]) == []
    assert problems_of("s", said, [SECOND, FIRST, ((9,), (9,))]) == []
    assert problems_of("s", said, [FIRST]) == ["s: 1 answers are not recorded, or differently"]
    assert problems_of("s", said, [SECOND, FIRST, FIRST, SECOND]) == [
        "s: 2 responses are recorded beside those that were answered, and 1 calls broke"
    ]


def test_the_responses_of_a_branch_come_with_the_ids_before_them() -> None:
    log = [
        Message(role="user", content="", token_ids=[1, 2]),
        Message(role="assistant", content="", token_ids=[3], generation_logprobs=[-1.0]),
        Message(role="user", content="", token_ids=[4]),
        Message(role="assistant", content="", token_ids=[5, 6], generation_logprobs=[-1.0, -1.0]),
    ]
    assert list(responses_in(log)) == [FIRST, SECOND]
    assert list(responses_in(log, shared=[1])) == [SECOND]


def test_a_round_in_which_something_ran_for_nobody_has_a_problem() -> None:
    rounds = [SessionRound("agent", 10, quiet, readable=10) for quiet in (0.4, 1.7, None)]
    assert [bool(one.problems()) for one in rounds] == [False, True, True]
    assert by_kind(rounds)["agent"]["later_than_goal"] == 2
    assert by_kind(rounds)["agent"]["longest_until_quiet_s"] == 1.7
