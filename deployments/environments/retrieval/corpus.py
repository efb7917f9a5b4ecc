"""Documents, and which of them fit a query best: BM25 by bm25s."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from rollout_client.ndjson import numbered_lines

Stopwords = Literal["en", "none"]


class CorpusInvalid(ValueError):
    """The corpus cannot be read. The message names file and line."""


class Document(BaseModel):
    """One document; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    id: str = Field(default="", validation_alias=AliasChoices("id", "_id", "docid"))
    """By default its place in the corpus, from 0."""
    title: str = ""
    text: str = Field(validation_alias=AliasChoices("text", "contents", "content"))

    @property
    def whole(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_corpus(path: Path) -> list[Document]:
    """The documents of a file with one JSON object a line.

    Raises:
        CorpusInvalid: there is no such file, or a line of it is no document.
    """
    documents: list[Document] = []
    try:
        with path.open("rb") as lines:
            documents += [document_of(line, f"{path}, line {number}") for number, line in numbered_lines(lines)]
    except OSError as error:
        raise CorpusInvalid(f"{path} cannot be read: {error.strerror}") from error
    return documents


def document_of(line: bytes, place: str) -> Document:
    try:
        return Document.model_validate(orjson.loads(line))
    except ValidationError as error:
        problem = error.errors()[0]
        raise CorpusInvalid(f"{place}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except orjson.JSONDecodeError as error:
        raise CorpusInvalid(f"{place} is not JSON: {error}") from error


class Corpus:
    """An index in memory. Threads may share it."""

    def __init__(self, documents: Sequence[Document], stopwords: Stopwords = "en") -> None:
        """Takes about a second for 10,000 documents of 100 words.

        Raises:
            CorpusInvalid: there is no document, or two have one id.
        """
        import bm25s

        if not documents:
            raise CorpusInvalid("a corpus needs at least one document")
        self.documents = [
            document if document.id else document.model_copy(update={"id": str(place)})
            for place, document in enumerate(documents)
        ]
        if len({document.id for document in self.documents}) < len(documents):
            raise CorpusInvalid("two documents have the same id")
        self._stopwords = stopwords if stopwords == "en" else []
        self._index = bm25s.BM25()
        tokens = bm25s.tokenize(
            [document.whole for document in documents], stopwords=self._stopwords, show_progress=False
        )
        # It cannot index a corpus without a single word, in which nothing is ever found.
        self._has_words = bool(tokens.vocab)
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], results: int) -> list[list[Document]]:
        """For each query at most so many documents that have a word of it, the best first."""
        import bm25s

        if not queries or not self._has_words:
            return [[] for _ in queries]
        tokens = bm25s.tokenize(list(queries), stopwords=self._stopwords, return_ids=False, show_progress=False)
        places, scores = self._index.retrieve(tokens, k=min(results, len(self.documents)), show_progress=False)
        return [
            [self.documents[place] for place, score in zip(of_query, its_scores, strict=True) if score > 0]
            for of_query, its_scores in zip(places.tolist(), scores.tolist(), strict=True)
        ]
