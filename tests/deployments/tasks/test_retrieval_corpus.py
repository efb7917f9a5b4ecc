"""Which documents a query finds, and what is no corpus."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tasks.retrieval import _Corpus, _Document, _read_corpus

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


def test_a_corpus_of_words_that_do_not_count_finds_nothing() -> None:
    assert _Corpus([_Document(text="the"), _Document(text="!")]).search(["the"], 2) == [[]]


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
