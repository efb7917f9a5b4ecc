"""A search tool over a corpus, and the answer that was to be found with it."""

import random
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.tasks.replies import last_box, last_tagged, text_outcome
from deployments.tasks.retrieval_corpus import Corpus, Document, invented_corpus, read_corpus
from deployments.tasks.tool_set import Tool, ToolSet, cut_result, tool_message
from rollout_env import (
    ChatMessage,
    JsonObject,
    MalformedCall,
    StepOutcome,
    TaskEnvironment,
    ToolCall,
    reply_text,
    tool_calls_of,
)

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


class RetrievalInfo(BaseModel):
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
    ExtraEnvInfo: ClassVar[type[BaseModel]] = RetrievalInfo

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
            documents, self._samples = invented_corpus()
        else:
            documents = read_corpus(_REPOSITORY / corpus)
        self.corpus = Corpus(documents)
        self.results, self.longest_document, self.most_searches = results, longest_document, most_searches
        self.tools: list[JsonObject] = [_SEARCH]
        self._tool_set = ToolSet([Tool(_SEARCH, str)])

    def step(self, message_log: list[ChatMessage], extra_env_info: RetrievalInfo) -> StepOutcome:
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

    def _text(self, documents: list[Document]) -> str:
        texts = (f"[{document.id}] {document.whole}"[: self.longest_document] for document in documents)
        return cut_result("\n".join(texts) or NOTHING_FOUND)

    def _judged(self, reply: ChatMessage, info: RetrievalInfo) -> StepOutcome:
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


def _known_item(document: Document) -> dict[str, Any]:
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
