"""Stored rollouts as training data: `export_rollouts`. Needs only pydantic.

| format | a row is | read by |
| --- | --- | --- |
| `sft` | `prompt` and `completion`, chat messages | TRL's `SFTTrainer` |
| `dpo` | `prompt`, `chosen` and `rejected`, chat messages of two rollouts of a group | TRL's `DPOTrainer` |
| `tokens` | `input_ids` and `labels`, -100 where no response is trained | TRL's `SFTTrainer`, as it is |

`tokens` has the tokens that the engine saw and generated. The others have texts, which their readers render with a chat
template: calls and reasoning that were parsed are fields of the message there. A row ends with its last trained
response: what the environment said after that is in no row. Responses that may not be trained
(`rollout_client.contract.messages.may_be_trained`) are context; a rollout with one where the format trains on all gives
no row.

Images stand before the text of their message, by name or as files: in `images` of a row and as parts of its messages.
Rows of tokens have no place for them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic_core import to_json

from rollout_client.contract.rollouts import SampleResult, SampleStatus
from rollout_client.data_out.files import JSON_LINES
from rollout_client.data_out.training_rows import (
    Conversation,
    DoesNotFit,
    Row,
    Turns,
    in_parts,
    labelled_tokens,
    prompt_key,
    template_fields,
)
from rollout_client.errors import RolloutError
from rollout_client.results import FINAL_STATUSES, final_reward, generated_places, seats_of, trained_places

ExportFormat = Literal["sft", "dpo", "tokens"]
Value = TypeVar("Value")
ImageFile = Callable[[str], Path | None]
MESSAGES = ("prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class ExportSelection:
    """Which rollouts become rows, and what of them is trained."""

    statuses: Collection[SampleStatus] = FINAL_STATUSES
    """The statuses that are kept."""
    best_of_group: bool = False
    """Keep of each group the rollout with the highest final reward; of equal ones the first."""
    min_reward: float | None = None
    """Keep rollouts with this final reward or a higher one."""
    min_gap: float = 0.0
    """Least difference between the rewards of a pair (`dpo`), which is more than 0 in any case."""
    pairs_per_group: int = 1
    """Most pairs of a group (`dpo`), those with the largest differences first: 1 is the best with the worst."""
    turns: Turns = "all"


class NothingToExport(RolloutError):
    """No rollout gives a row: no rollouts, no rewards, no pair in any group, no tokens; the message counts why.

    Args:
        left_out: the number of rollouts by the reason for which each is in no row.
    """

    def __init__(self, format: ExportFormat, left_out: Mapping[str, int]) -> None:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items())
        super().__init__(f"Nothing can be exported as {format}: {reasons or 'there are no rollouts'}.")
        self.format, self.left_out = format, dict(left_out)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.format, self.left_out)


@dataclass(frozen=True, slots=True)
class Export:
    """The rows, and an account of the rollouts that are in none of them."""

    format: ExportFormat
    rows: list[Row]
    rollouts: int
    """Number of rollouts that were read."""
    left_out: Mapping[str, int]
    """Number of rollouts by the reason for which each is in no row."""
    notes: Mapping[str, int]
    """Number of rows, or of branches, by what is not as a reader may expect it."""

    def save(self, path: str | Path) -> None:
        """Writes the rows to `path` as JSON lines. Raises `ValueError` if the name does not end in `.jsonl`."""
        path = Path(path)
        if path.suffix != JSON_LINES:
            raise ValueError(f"{path} must end in {JSON_LINES}: a column would give each message the fields of all.")
        path.write_bytes(b"".join(to_json(row) + b"\n" for row in self.rows))


def export_rollouts(
    rollouts: Iterable[SampleResult],
    format: ExportFormat,
    selection: ExportSelection = ExportSelection(),
    image_file: ImageFile | None = None,
) -> Export:
    """The rows of `rollouts` in `format`, in their order; pairs in the order of their groups.

    A group is made of the rollouts that have task, `input_row` or `idx`, `id` and prompt in common, wherever they
    stand; each seat of a game is a rollout of its own. A rollout that needs a reward and has no final one is left out,
    as is everything that the format cannot hold.

    Args:
        image_file: the file of an image by its name, or `None` if there is none: rows then have paths. By default they
            have the names.

    Raises:
        NothingToExport: there is no row.
        ValueError: pairs are to be made of the best of each group.
    """
    if format == "dpo" and selection.best_of_group:
        raise ValueError("best_of_group keeps one rollout of each group, and a pair (dpo) needs two.")
    exporter = _Exporter(format, selection, image_file)
    rollouts = chain.from_iterable(map(seats_of, rollouts))
    rows = list(exporter.pair_rows(rollouts) if format == "dpo" else exporter.rows(rollouts))
    if not rows:
        raise NothingToExport(format, exporter.left_out)
    if any("images" in row for row in rows):
        rows = [_with_images(row) for row in rows]
    if any("chat_template_kwargs" in row for row in rows):
        # TRL cannot take the null that a reader of the file gives to the others.
        rows = [{**row, "chat_template_kwargs": row.get("chat_template_kwargs", {})} for row in rows]
    return Export(format, rows, exporter.rollouts, dict(exporter.left_out), dict(exporter.notes))


class _Exporter:
    """Makes rows and counts what it leaves out."""

    def __init__(self, format: ExportFormat, selection: ExportSelection, image_file: ImageFile | None = None) -> None:
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.rollouts = 0
        self._format = format
        self._selection = selection
        self._image_file = image_file

    def rows(self, rollouts: Iterable[SampleResult]) -> Iterator[Row]:
        kept = self._kept(rollouts)
        for sample in self._best(kept) if self._selection.best_of_group else kept:
            row = self._try(partial(self._row, sample))
            if row is not None:
                self._note(sample)
                yield row

    def _try(self, make: Callable[[], Value]) -> Value | None:
        try:
            return make()
        except DoesNotFit as reason:
            self.left_out[str(reason)] += 1
            return None

    def _kept(self, rollouts: Iterable[SampleResult]) -> Iterator[SampleResult]:
        for sample in rollouts:
            self.rollouts += 1
            if (reason := self._reason_against(sample)) is None:
                yield sample
            else:
                self.left_out[reason] += 1

    def _reason_against(self, sample: SampleResult) -> str | None:
        reward, least = final_reward(sample), self._selection.min_reward
        if sample.status not in self._selection.statuses:
            return f"status {sample.status}"
        if reward is None:
            needs_reward = self._selection.best_of_group or least is not None or self._format == "dpo"
            return "no final reward" if needs_reward else None
        return f"a reward below {least:g}" if least is not None and reward < least else None

    def _best(self, rollouts: Iterable[SampleResult]) -> Iterator[SampleResult]:
        for group in _groups_of(rollouts):
            if len(group) > 1:
                self.left_out["not the best of its group"] += len(group) - 1
            yield max(group, key=_reward_of)

    def _row(self, sample: SampleResult) -> Row:
        if self._format == "tokens":
            return labelled_tokens(sample, self._selection.turns)
        _, chat = self._chat(sample, may_have_observations=True)
        return {**chat, **template_fields(sample)}

    def _source(self, name: str) -> str:
        if self._image_file is None:
            return name
        if (file := self._image_file(name)) is None:
            raise DoesNotFit("an image that the service does not have any more")
        return str(file)

    def _note(self, sample: SampleResult) -> None:
        if sample.branches:
            self.notes["branches of agents, which are in no row"] += len(sample.branches)
        if self._format == "sft" and self._selection.turns == "all" and len(trained_places(sample)) > 1:
            self.notes["rows with several responses: train them with assistant_only_loss=True"] += 1

    def pair_rows(self, rollouts: Iterable[SampleResult]) -> Iterator[Row]:
        gap = f" by {self._selection.min_gap:g}" if self._selection.min_gap else ""
        for group in _groups_of(self._kept(rollouts)):
            given = [
                (sample, *pairable)
                for sample in group
                if (pairable := self._try(partial(self._chat, sample, may_have_observations=False))) is not None
            ]
            pairs = list(self._pairs_of(given))
            taken = pairs[: self._selection.pairs_per_group]
            for better, worse in taken:
                (sample, _, chat), (*_, other) = given[better], given[worse]
                row = {"prompt": chat["prompt"], "chosen": chat["completion"], "rejected": other["completion"]}
                row |= {"images": chat["images"]} if "images" in chat else {}
                yield {**row, **template_fields(sample)}
            for place, (sample, *_) in enumerate(given):
                if any(place in pair for pair in taken):
                    self._note(sample)
                elif any(place in pair for pair in pairs):
                    self.left_out["its group has its pairs without it"] += 1
                else:
                    self.left_out[f"no other response to its prompt has a reward that differs{gap}"] += 1

    def _pairs_of(self, given: Sequence[tuple[SampleResult, Conversation, Row]]) -> Iterator[tuple[int, int]]:
        """The better and the worse one of each pair: other responses to one prompt, with the largest gap first."""
        rewards = [_reward_of(sample) for sample, *_ in given]
        places = sorted(range(len(rewards)), key=lambda place: -rewards[place])
        # The sort is stable: equal gaps stay in the order of their rewards.
        for better, worse in sorted(combinations(places, 2), key=lambda pair: rewards[pair[1]] - rewards[pair[0]]):
            (_, one, _), (_, other, _) = given[better], given[worse]
            gap = rewards[better] - rewards[worse]
            is_apart = gap > 0 and gap >= self._selection.min_gap
            texts = [[message.content for message in each.messages] for each in (one, other)]
            if is_apart and one.prompt_key == other.prompt_key and texts[0] != texts[1]:
                yield better, worse

    def _chat(self, sample: SampleResult, may_have_observations: bool) -> tuple[Conversation, Row]:
        conversation = Conversation.of(sample, self._selection.turns)
        conversation.check_completion(may_have_observations)
        return conversation, conversation.chat(self._source)


def _groups_of(rollouts: Iterable[SampleResult]) -> list[list[SampleResult]]:
    """The rollouts of each sample, in order of first appearance. `idx` alone is unique within one request only."""
    groups: dict[Any, list[SampleResult]] = defaultdict(list)
    for sample in rollouts:
        row = (sample.model_extra or {}).get("input_row", sample.idx)
        first = (generated_places(sample) or [len(sample.message_log)])[0]
        groups[sample.task_name, row, sample.id, tuple(prompt_key(sample.message_log[:first]))].append(sample)
    return list(groups.values())


def _with_images(row: Row) -> Row:
    """The row in the form of those that show images: TRL takes one form for all rows of a file."""
    chats: dict[str, Any] = {name: row[name] for name in MESSAGES if name in row}
    messages: Row = {name: [*map(in_parts, chat)] for name, chat in chats.items()}
    return {**row, **messages, "images": row.get("images", [])}


def _reward_of(sample: SampleResult) -> float:
    """The final reward of a rollout that has one."""
    return final_reward(sample) or 0.0
