"""Searches over turns, and the answer that was to be found."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tasks.retrieval import (
    NO_MORE_SEARCHES,
    NOTHING_FOUND,
    RetrievalEnvironment,
    _Corpus,
    _Document,
    _read_corpus,
)
from rollout_env import check, play
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


def test_searches_of_one_reply_are_answered_in_order(environment: RetrievalEnvironment) -> None:
    replies = [search("cats") + search(3) + '<tool_call>{"name": "find"}</tool_call>' + search("zebra"), "France"]
    played = play(environment, replies, QUESTION)
    results = tool_results(played)
    assert (results[0], results[3]) == ("[cats] Cats sleep.", NOTHING_FOUND)
    assert "arguments.query: 3 is not of type" in results[1]
    assert "There is no tool find. The tools are: search." in results[2]
    assert played.metrics == {"searches": 2, "malformed_calls": 2, "found": 0.0}
    assert (played.total_reward, played.terminated) == (0.0, True)


def test_searches_beyond_their_number_are_not_made(environment: RetrievalEnvironment) -> None:
    played = play(environment, [search("cats") * 2, search("cats") * 2, "x"], QUESTION)
    assert tool_results(played)[2:] == ["[cats] Cats sleep.", NO_MORE_SEARCHES]
    assert played.metrics["searches"] == 3


def test_long_documents_are_cut(corpus: Path) -> None:
    short = RetrievalEnvironment(corpus=corpus, longest_document=8)
    assert tool_results(play(short, [search("cats")], QUESTION)) == ["[cats] C"]


@pytest.mark.parametrize(
    ("reply", "truth", "reward"),
    [
        ("", "A", 0.0),
        ("\\boxed{the}", "A", 0.0),
        ("\\boxed{!!!}", "A", 0.0),
        ("\\boxed{A.}", "a", 1.0),
        ("\\boxed{The The}", "The The", 1.0),
        ("\\boxed{The  Eiffel-Tower, a!}", "eiffeltower", 1.0),
        ("\\boxed{Anthem}", "them", 0.0),
        ("\\boxed{The}", "The The", 0.0),
        ("\\boxed{!!!}", "!!!", 1.0),
        ("\\boxed{?}", "!!!", 0.0),
        (" ", "", 0.0),
        ("The <answer> Rome </answer>", "Rome", 1.0),
        ("<answer>it<answer>Rome</answer> is</answer>", "Rome", 1.0),
        ("<answer>Rome</answer> <answer>it", "Rome", 1.0),
        ("Rome</answer><answer>", "Rome</answer><answer>", 1.0),
        ("\\boxed{it}\\boxed{Rome}", "Rome", 1.0),
        (" Rome. ", "Rome.", 1.0),
    ],
)
def test_answers_are_compared_without_case_punctuation_and_articles(
    environment: RetrievalEnvironment, reply: str, truth: str, reward: float
) -> None:
    assert play(environment, [reply], {**QUESTION, "extra_env_info": {"answers": [truth]}}).total_reward == reward


def test_examples_of_a_given_corpus_ask_for_a_document(environment: RetrievalEnvironment) -> None:
    [sample] = environment.example_samples(1, seed=0)
    assert play(environment, sample["extra_env_info"]["answers"], sample).total_reward == 1.0


def test_it_keeps_the_rules_for_environments(corpus: Path) -> None:
    check(lambda: RetrievalEnvironment(corpus=corpus), replies=[search("Ann"), "Italy"])


DOCUMENTS = [
    _Document(id="a", text="Paris is the capital of France."),
    _Document(id="b", title="Berlin", text="The capital of Germany, on the Spree."),
    _Document(text="Cats sleep."),
]
CORPUS = _Corpus(DOCUMENTS)


def found(*queries: str, results: int = 3) -> list[list[str]]:
    return [[document.id for document in documents] for documents in CORPUS.search(queries, results)]


def test_the_documents_with_the_words_of_a_query_are_found_best_first() -> None:
    assert found("capital of France", "BERLIN", "cats", "capital") == [["a", "b"], ["b"], ["2"], found("capital")[0]]
    assert set(found("capital")[0]) == {"a", "b"}
    assert found("capital", results=1) == [found("capital")[0][:1]]


def test_a_query_without_a_word_of_the_corpus_finds_nothing() -> None:
    assert found("", "zebra", "the of is", "!?", "x") == [[], [], [], [], []]
    assert found() == []


@given(st.lists(st.text(alphabet="caps of the berlin?é\x00\n", max_size=20), max_size=5))
def test_no_query_raises_and_each_finds_what_it_finds_alone(queries: list[str]) -> None:
    assert found(*queries) == [found(query)[0] for query in queries]


def test_a_corpus_is_read_from_lines_under_the_usual_names(tmp_path: Path) -> None:
    lines = [
        '{"_id": 7, "title": "T", "text": "x"}',
        "",
        '{"id": "b", "contents": "y", "more": 1}',
        '{"text": "z\u2028\x85"}',
    ]
    path = tmp_path / "corpus.jsonl"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("\n".join(lines), encoding=encoding)
        documents = _Corpus(_read_corpus(path)).documents
        assert [(each.id, each.whole) for each in documents] == [("7", "T\nx"), ("b", "y"), ("2", "z\u2028\x85")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: No such file"),
        ('{"text": "a"}\n{', r"line 2: [\s\S]*Invalid JSON"),
        ('{"title": "a"}', r"line 1: [\s\S]*text\n  Field required"),
        ("", "at least one document"),
        ('{"id": "a", "text": "a"}\n{"id": "a", "text": "b"}', "two documents have the same id"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "corpus.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        _Corpus(_read_corpus(path))
