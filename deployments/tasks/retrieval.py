"""A search tool over a corpus, and the answer that was to be found with it.

The documents are read from a file or invented, and indexed by BM25 (bm25s). The invented ones are about people and
towns that do not exist: what a model knows of the world does not help.
"""

import random
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from deployments.tasks.replies import last_box, last_tagged, text_outcome
from deployments.tasks.tool_calls import Tool, ToolSet, cut_result, tool_message
from rollout_env import (
    ChatMessage,
    JsonObject,
    MalformedCall,
    Reference,
    StepOutcome,
    TaskEnvironment,
    ToolCall,
    reply_text,
    tool_calls_of,
)
from rollout_env.tool_calls import written_call

_REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING_FOUND = "No document found."
NO_MORE_SEARCHES = "The search was not made: no more are permitted. Answer."
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORDS_IN_QUOTE = 8
_SEARCH: JsonObject = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
_Item = TypeVar("_Item")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Document(BaseModel):
    """One document; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    id: str = Field(default="", validation_alias=AliasChoices("id", "_id", "docid"))
    """By default its place in the corpus, from 0."""
    title: str = ""
    text: str = Field(validation_alias=AliasChoices("text", "contents", "content"))

    @property
    def whole(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def _read_corpus(path: Path) -> list[_Document]:
    """The documents of a file with one JSON object a line. Empty lines and a byte-order mark are ignored.

    Lines end at \\n only: a text may contain U+0085 and U+2028, at which other readers split too.

    Raises:
        ValueError: the file cannot be read, or a line is not a document. The message names file and line.
    """
    try:
        lines = path.read_bytes().removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    documents: list[_Document] = []
    for number, line in enumerate(lines, start=1):
        try:
            documents += [_Document.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return documents


class _Corpus:
    """An index in memory. Threads may share it."""

    def __init__(self, documents: Sequence[_Document]) -> None:
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

    def search(self, queries: Sequence[str], results: int) -> list[list[_Document]]:
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


def _invented_corpus(seed: int = 0) -> tuple[list[_Document], list[dict[str, Any]]]:
    """Documents about people and towns, and samples about them, some of which need two searches."""
    draw = random.Random(seed)
    names = _invented_names(draw, 2 * _PEOPLE + 2 * _TOWNS)
    people = [f"{first} {last}" for first, last in zip(names[:_PEOPLE], names[_PEOPLE : 2 * _PEOPLE], strict=True)]
    towns, countries = names[2 * _PEOPLE : 2 * _PEOPLE + _TOWNS], names[2 * _PEOPLE + _TOWNS :]
    documents = [
        _Document(id=f"town-{place}", title=town, text=f"{town} is a town in {country}.")
        for place, (town, country) in enumerate(zip(towns, countries, strict=True))
    ]
    samples = []
    for place, person in enumerate(people):
        job, home = draw.choice(_JOBS), draw.randrange(_TOWNS)
        own = f"person-{place}"
        documents.append(_Document(id=own, title=person, text=f"{person} is a {job} and lives in {towns[home]}."))
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


class _RetrievalInfo(BaseModel):
    """The `extra_env_info` of a question; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    answers: Annotated[list[str], Field(min_length=1)]
    """Any of them is right. Case, punctuation and articles do not count, unless a text has nothing else."""
    relevant: list[str] = []
    """Ids of the documents that tell the answer: the metric `found` is the share of them that a search gave."""
    searches: int = 0
    """Number of searches so far."""
    found: list[str] = []
    """Ids of the relevant documents that were found so far."""


class RetrievalEnvironment(TaskEnvironment):
    """Answers searches over turns, until a reply makes none, whose answer is judged by exact match.

    The answer is what is in the last box, or between `<answer>` tags, or the whole reply.
    """

    description: ClassVar[str] = "Questions to answer with a search of documents."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _RetrievalInfo

    def __init__(
        self,
        corpus: Path | None = None,
        results: Annotated[int, Field(ge=1, le=100)] = 3,
        longest_document: Annotated[int, Field(ge=1)] = 1000,
        most_searches: Annotated[int, Field(ge=1)] = 8,
    ) -> None:
        """Reads and indexes the corpus.

        Args:
            corpus: a file with one JSON object a line, with `text` and optionally `title` and `id`; by default a corpus
                of invented people and towns.
            results: documents of one search.
            longest_document: characters of a document that the model gets to see.
            most_searches: of one rollout. Further ones are not made.

        Raises:
            ValueError: the file cannot be read, or has no documents.
        """
        self._samples: list[dict[str, Any]] | None = None
        if corpus is None:
            documents, self._samples = _invented_corpus()
        else:
            documents = _read_corpus(_REPOSITORY / corpus)
        self.corpus = _Corpus(documents)
        self.results, self.longest_document, self.most_searches = results, longest_document, most_searches
        self.tools: list[JsonObject] = [_SEARCH]
        self._tool_set = ToolSet([Tool(_SEARCH, str)])

    def step(self, message_log: list[ChatMessage], extra_env_info: _RetrievalInfo) -> StepOutcome:
        """Makes the searches of the reply, or judges it if it has none."""
        info, reply = extra_env_info, message_log[-1]
        calls = [*map(self._tool_set.checked, tool_calls_of(reply, self.tools))]
        if not calls:
            return self._judged(reply, info)
        queries = [call.arguments["query"] for call in calls if isinstance(call, ToolCall)]
        hits = self.corpus.search(queries[: max(self.most_searches - info.searches, 0)], self.results)
        texts = map(self._text, hits)
        messages = [
            self._tool_set.answer(call)
            if isinstance(call, MalformedCall)
            else tool_message(next(texts, NO_MORE_SEARCHES), call)
            for call in calls
        ]
        found = {document.id for documents in hits for document in documents} & set(info.relevant)
        state = {"searches": info.searches + len(hits), "found": sorted(found.union(info.found))}
        return StepOutcome(
            messages,
            {"correct": 0.0},
            terminated=False,
            metadata={**info.model_dump(), **state},
            metrics={"searches": len(hits), "malformed_calls": len(calls) - len(queries)},
        )

    def _text(self, documents: list[_Document]) -> str:
        texts = (f"[{document.id}] {document.whole}"[: self.longest_document] for document in documents)
        return cut_result("\n".join(texts) or NOTHING_FOUND)

    def _judged(self, reply: ChatMessage, info: _RetrievalInfo) -> StepOutcome:
        answer = _answer_in(reply_text(reply))
        given = _normalized(answer)
        right = given != "" and given in map(_normalized, info.answers)
        metrics = {"found": len(info.found) / len(set(info.relevant))} if info.relevant else None
        return text_outcome(
            f"Environment: {'correct' if right else 'incorrect'}.",
            {"correct": float(right)},
            terminated=True,
            answer=answer or None,
            metrics=metrics,
        )

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """A search for the question, and then the first of the answers."""
        search = written_call("search", {"query": sample["messages"][-1]["content"]})
        return Reference([search, sample["extra_env_info"]["answers"][0]])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Questions about the invented corpus; of another one, which document has some words of it.

        The same ones come again, in another order, when there are no further ones.
        """
        draw = random.Random(seed)
        if self._samples is not None:
            return _drawn(self._samples, count, draw)
        return [_known_item(document) for document in _drawn(self.corpus.documents, count, draw)]


def _drawn(pool: Sequence[_Item], count: int, draw: random.Random) -> list[_Item]:
    """So many items in a random order, none a second time before all were drawn."""
    rounds, rest = divmod(count, len(pool))
    sizes = [len(pool)] * rounds + [rest]
    return [item for size in sizes for item in draw.sample(pool, size)]


def _known_item(document: _Document) -> dict[str, Any]:
    quote = " ".join(document.text.split()[:_WORDS_IN_QUOTE])
    question = f"Which document begins with the words: {quote}? Answer with the id in square brackets before it."
    return {
        "messages": [{"role": "user", "content": question}],
        "extra_env_info": {"answers": [document.id], "relevant": [document.id]},
    }


def _answer_in(text: str) -> str:
    marked = (part for part in (last_box(text), last_tagged(text, "answer")) if part is not None)
    return next(marked, text).strip()


def _normalized(answer: str) -> str:
    """As the SQuAD benchmark compares answers: without case, punctuation, articles and further spaces.

    Articles or punctuation that are all of a text stay: `The The` is a name, and no other text made of articles is it.
    Only a text without any character is normalized to nothing, which no answer equals.
    """
    lowered = answer.lower()
    words = lowered.translate(_PUNCTUATION)
    return next(filter(None, map(_one_spaced, (_ARTICLES.sub(" ", words), words, lowered))), "")


def _one_spaced(text: str) -> str:
    return " ".join(text.split())
