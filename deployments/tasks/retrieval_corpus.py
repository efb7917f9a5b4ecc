"""The documents of the task `retrieval`, read from a file or invented, and their index: BM25 by bm25s.

The invented corpus is about people and towns that do not exist, with questions: what a model knows of the world does
not help.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
    """The documents of a file with one JSON object a line. Empty lines and a byte-order mark are ignored.

    Lines end at \\n only: a text may contain U+0085 and U+2028, at which other readers split too.

    Raises:
        ValueError: the file cannot be read, or a line is not a document. The message names file and line.
    """
    try:
        lines = path.read_bytes().removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    documents: list[Document] = []
    for number, line in enumerate(lines, start=1):
        try:
            documents += [Document.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return documents


class Corpus:
    """An index in memory. Threads may share it."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Takes about a second for 10,000 documents of 100 words.

        Raises:
            ValueError: there is no document, or two have one id.
        """
        import bm25s

        if not documents:
            raise ValueError("a corpus needs at least one document")
        self.documents = [
            document if document.id else document.model_copy(update={"id": str(place)})
            for place, document in enumerate(documents)
        ]
        if len({document.id for document in self.documents}) < len(documents):
            raise ValueError("two documents have the same id")
        self._index = bm25s.BM25()
        tokens = bm25s.tokenize([document.whole for document in documents], show_progress=False)
        # It cannot index a corpus without a single word, in which nothing is ever found.
        self._has_words = bool(tokens.vocab)
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], results: int) -> list[list[Document]]:
        """For each query at most `results` documents that share a word with it, the best first."""
        import bm25s

        if not queries or not self._has_words:
            return [[] for _ in queries]
        tokens = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        places, scores = self._index.retrieve(tokens, k=min(results, len(self.documents)), show_progress=False)
        return [
            [self.documents[place] for place, score in zip(of_query, its_scores, strict=True) if score > 0]
            for of_query, its_scores in zip(places.tolist(), scores.tolist(), strict=True)
        ]


_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_JOBS = ("baker", "pilot", "singer", "farmer", "doctor", "painter", "sailor", "teacher")
_PEOPLE, _TOWNS = 200, 40


def invented_corpus(seed: int = 0) -> tuple[list[Document], list[dict[str, Any]]]:
    """Documents about people and towns, and samples about them, some of which need two searches."""
    draw = random.Random(seed)
    names = _invented_names(draw, 2 * _PEOPLE + 2 * _TOWNS)
    people = [f"{first} {last}" for first, last in zip(names[:_PEOPLE], names[_PEOPLE : 2 * _PEOPLE], strict=True)]
    towns, countries = names[2 * _PEOPLE : 2 * _PEOPLE + _TOWNS], names[2 * _PEOPLE + _TOWNS :]
    documents = [
        Document(id=f"town-{place}", title=town, text=f"{town} is a town in {country}.")
        for place, (town, country) in enumerate(zip(towns, countries, strict=True))
    ]
    samples = []
    for place, person in enumerate(people):
        job, home = draw.choice(_JOBS), draw.randrange(_TOWNS)
        own = f"person-{place}"
        documents.append(Document(id=own, title=person, text=f"{person} is a {job} and lives in {towns[home]}."))
        for question, answer, relevant in (
            (f"Where does {person} live?", towns[home], [own]),
            (f"What does {person} do?", job, [own]),
            (f"In which country does {person} live?", countries[home], [own, f"town-{home}"]),
        ):
            info = {"answers": [answer], "relevant": relevant}
            samples.append({"messages": [{"role": "user", "content": question}], "extra_env_info": info})
    return documents, samples


def _invented_names(draw: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choices(_SYLLABLES, k=3)).capitalize()] = None
    return list(names)
