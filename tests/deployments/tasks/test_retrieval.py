"""Searches over turns, and the answer that was to be found."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.tasks.retrieval import (
    NO_MORE_SEARCHES,
    NOTHING_FOUND,
    RetrievalEnvironment,
    _answer_in,
    _normalized,
)
from rollout_env import ChatMessage, check, play
from rollout_env.play import PlayResult


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    documents = [
        {"id": "ann", "text": "Ann Lee is a pilot and lives in Rome."},
        {"id": "rome", "title": "Rome", "text": "A town in Italy."},
        {"id": "cats", "text": "Cats sleep."},
    ]
    path.write_text("\n".join(map(json.dumps, documents)))
    return path


@pytest.fixture(scope="module")
def environment(corpus: Path) -> RetrievalEnvironment:
    return RetrievalEnvironment(corpus=corpus, results=1, most_searches=3)


QUESTION = {
    "messages": [{"role": "user", "content": "In which country does Ann Lee live?"}],
    "extra_env_info": {"answers": ["Italy"], "relevant": ["ann", "rome"]},
}


def search(query: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"


def tool_results(played: PlayResult) -> list[str]:
    return [message["content"] for message in played.message_log if message["role"] == "tool"]


def test_two_searches_lead_to_the_answer(environment: RetrievalEnvironment) -> None:
    played = play(environment, [search("Ann Lee"), search("Rome town"), "\\boxed{Italy}"], QUESTION)
    assert tool_results(played) == ["[ann] Ann Lee is a pilot and lives in Rome.", "[rome] Rome\nA town in Italy."]
    assert (played.rewards, played.terminated, played.answers[-1]) == ({"correct": 1.0}, True, "Italy")
    assert played.metrics == {"searches": 2, "malformed_calls": 0, "found": 1.0}


def test_several_searches_of_one_reply_are_answered_in_order_and_each_bad_one_says_why(
    environment: RetrievalEnvironment,
) -> None:
    replies = [search("cats") + search(3) + '<tool_call>{"name": "find"}</tool_call>' + search("zebra"), "France"]
    played = play(environment, replies, QUESTION)
    results = tool_results(played)
    assert (results[0], results[3]) == ("[cats] Cats sleep.", NOTHING_FOUND)
    assert "arguments.query: 3 is not of type" in results[1]
    assert "There is no tool find. The tools are: search." in results[2]
    assert played.metrics == {"searches": 2, "malformed_calls": 2, "found": 0.0}
    assert (played.total_reward, played.terminated) == (0.0, True)


def test_calls_that_the_service_has_parsed_are_answered_with_their_ids(environment: RetrievalEnvironment) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": '{"query": "cats"}'}}
    reply: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert play(environment, [reply], QUESTION).message_log[-1] == {
        "role": "tool",
        "content": "[cats] Cats sleep.",
        "tool_call_id": "call00000",
        "name": "search",
    }


def test_searches_beyond_their_number_are_not_made(environment: RetrievalEnvironment) -> None:
    played = play(environment, [search("cats") * 2, search("cats") * 2, "x"], QUESTION)
    assert tool_results(played)[2:] == ["[cats] Cats sleep.", NO_MORE_SEARCHES]
    assert played.metrics["searches"] == 3


def test_long_documents_are_cut(corpus: Path) -> None:
    short = RetrievalEnvironment(corpus=corpus, longest_document=8)
    assert tool_results(play(short, [search("cats")], QUESTION)) == ["[cats] C"]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The <answer> Rome </answer>", "Rome"),
        ("<answer>a</answer><answer>Rome</answer>", "Rome"),
        ("<answer>a<answer>Rome</answer> b</answer>", "Rome"),
        ("<answer>Rome</answer> <answer>a", "Rome"),
        ("Rome</answer><answer>", "Rome</answer><answer>"),
        ("\\boxed{a}\\boxed{Rome}", "Rome"),
        (" Rome. ", "Rome."),
        ("", ""),
    ],
)
def test_the_answer_is_in_a_box_or_in_tags_or_the_whole_reply(reply: str, answer: str) -> None:
    assert _answer_in(reply) == answer


def test_a_reply_of_open_tags_alone_is_read_in_one_pass() -> None:
    reply = "<answer>" * 100_000
    assert _answer_in(reply) == reply


def test_answers_are_compared_without_case_punctuation_and_articles() -> None:
    assert _normalized("The  Eiffel-Tower, a!") == _normalized("eiffeltower") == "eiffeltower"
    assert _normalized("Anthem") == "anthem"


@pytest.mark.parametrize(
    ("reply", "truth", "reward"),
    [
        ("\\boxed{}", "A", 0.0),
        ("", "A", 0.0),
        ("\\boxed{the}", "A", 0.0),
        ("\\boxed{!!!}", "A", 0.0),
        ("<answer></answer>", "A", 0.0),
        ("\\boxed{a}", "A", 1.0),
        ("\\boxed{A.}", "a", 1.0),
        ("\\boxed{The The}", "The The", 1.0),
        ("\\boxed{The}", "The The", 0.0),
        ("\\boxed{!!!}", "!!!", 1.0),
        ("\\boxed{?}", "!!!", 0.0),
        ("", "", 0.0),
        (" ", "", 0.0),
        ("\\boxed{the}", "", 0.0),
        ("\\boxed{!!!}", "", 0.0),
    ],
)
def test_a_text_of_which_nothing_is_left_equals_no_answer(
    environment: RetrievalEnvironment, reply: str, truth: str, reward: float
) -> None:
    question = {**QUESTION, "extra_env_info": {"answers": [truth]}}
    assert play(environment, [reply], question).total_reward == reward


def test_examples_of_the_invented_corpus_are_answered_by_their_relevant_documents() -> None:
    environment = RetrievalEnvironment()
    texts = {document.id: document.whole for document in environment.corpus.documents}
    for sample in environment.example_samples(30, seed=1):
        info = sample["extra_env_info"]
        assert any(info["answers"][0] in texts[relevant] for relevant in info["relevant"])
    sample = environment.example_samples(1, seed=1)[0]
    subject = texts[sample["extra_env_info"]["relevant"][0]].split("\n")[0]
    played = play(environment, [search(subject), sample["extra_env_info"]["answers"][0]], sample)
    assert played.total_reward == 1.0
    assert played.metrics["found"] > 0


def test_examples_of_a_given_corpus_ask_for_a_document(environment: RetrievalEnvironment) -> None:
    [sample] = environment.example_samples(1, seed=0)
    assert play(environment, sample["extra_env_info"]["answers"], sample).total_reward == 1.0


def test_it_keeps_the_rules_for_environments(corpus: Path) -> None:
    check(lambda: RetrievalEnvironment(corpus=corpus), replies=[search("Ann"), "Italy"])


def test_more_example_samples_than_there_are_questions_repeat_all_of_them() -> None:
    environment = RetrievalEnvironment()
    samples = environment.example_samples(1300, seed=4)
    texts = [sample["messages"][0]["content"] for sample in samples]
    assert len(set(texts[:600])) == 600
    assert set(texts[:600]) == set(texts[600:1200])
    assert len(set(texts[1200:])) == 100
    assert environment.example_samples(9, seed=4) == environment.example_samples(9, seed=4)
