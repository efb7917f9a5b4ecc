"""The deployment of a reward model, a sequence-classification model by transformers.

`RemoteRewardModel` (`deployments/models/clients.py`) is the caller. Conversations that come while others are
scored are scored together. torch is imported when a model is loaded.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from deployments import logs
from deployments.chat.text_encoder import TextEncoder
from deployments.chat.tokenizer_loading import load_tokenizer
from deployments.models.settings import RewardModelSettings
from deployments.rpc.batching import CallBatcher, group_commit, results_of
from rollout_env import ChatMessage


def _batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Divides items into batches, given their lengths in tokens: each batch is the places of its items.

    Items of similar length go together, because all of a batch are padded to its longest: a batch has, padding
    included, at most `most_tokens` tokens, or one item that is longer alone. Each place is in exactly one batch.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        # In ascending order, the item that comes next is the longest of its batch.
        if batch and (len(batch) + 1) * lengths[place] > most_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


class _ClassificationModel:
    """Scores conversations. One thread at a time may use it."""

    def __init__(self, settings: RewardModelSettings) -> None:
        """Loads the model.

        Raises:
            UnsupportedTokenizer: see `load_tokenizer`.
            ValueError: it has no such label, no chat template, or no token to pad with.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        self._settings = settings
        self._device = "cuda" if settings.device == "gpu" else "cpu"
        self._tokenizer: Any = load_tokenizer(settings.model)
        if self._tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {settings.model} has no chat template")
        self._encoder = TextEncoder(self._tokenizer)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype)
        )
        self._model = model.eval().to(self._device)
        labels = self._model.config.num_labels
        if settings.label >= labels:
            raise ValueError(f"label {settings.label} is not below {labels}, the number of labels of {settings.model}")
        self._pad_token_id = self._padding_token()
        # A decoder model looks for the last token that is not padding, so its padding token is that of the tokenizer.
        self._model.config.pad_token_id = self._pad_token_id

    def _padding_token(self) -> int:
        for token_id in (self._model.config.pad_token_id, self._tokenizer.pad_token_id, self._tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise ValueError(f"neither {self._settings.model} nor its tokenizer names a token to pad with")

    def tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The conversation by the model's chat template. Control tokens that it spells are ordinary text."""
        control_tokens = self._encoder.control_tokens
        hidden = control_tokens.hidden_in_prompt(messages, "all", echoes_answers=True)
        rendered = str(self._tokenizer.apply_chat_template([*hidden], tokenize=False))
        ids = self._encoder.encode(control_tokens.restored(rendered)).ids
        return ids[-self._settings.max_length :] or [self._pad_token_id]

    def scores(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        """The score of each conversation, given as token ids.

        Those that are not finite stay as they are: the caller fails their samples alone.
        """
        scores = [math.nan] * len(conversations)
        for batch in _batches([len(ids) for ids in conversations], self._settings.max_batch_tokens):
            for place, score in zip(batch, self._forward([conversations[place] for place in batch]), strict=True):
                scores[place] = score
        return scores

    def _forward(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        import torch

        longest = max(map(len, conversations))
        ids = torch.full((len(conversations), longest), self._pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(conversations), longest), dtype=torch.long)
        for row, conversation in enumerate(conversations):
            ids[row, : len(conversation)] = torch.tensor(conversation)
            mask[row, : len(conversation)] = 1
        with torch.inference_mode():
            logits = self._model(ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return [float(score) for score in logits[:, self._settings.label].float().tolist()]


logger = logging.getLogger("rollout_service.models")
Conversation = Sequence[ChatMessage]
Result = float | Exception


class RewardModelReplica:
    """One replica of one reward model. Keeps nothing between calls."""

    def __init__(self, settings: RewardModelSettings, scorer: Any = None) -> None:
        """Loads the model of the settings, or takes `scorer` in its place, for tests."""
        if scorer is None:
            logs.configure()
        self._scorer: _ClassificationModel = _ClassificationModel(settings) if scorer is None else scorer
        self._batcher: CallBatcher[Conversation, float] = group_commit(self._scored)

    async def score(self, conversations: list[list[ChatMessage]]) -> list[Result]:
        """The score of each conversation; in its place the exception of one that the model cannot score."""
        return await results_of([self._batcher.call(conversation) for conversation in conversations])

    async def _scored(self, conversations: list[Conversation]) -> list[Result]:
        return await asyncio.to_thread(self._results, conversations)

    def _results(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Together; if that fails, one by one, so that only those fail that the model cannot score."""
        try:
            return [
                _finite(score) for score in self._scorer.scores([self._scorer.tokens(each) for each in conversations])
            ]
        except Exception as error:
            if len(conversations) == 1:
                logger.warning("A conversation could not be scored.", exc_info=error)
                return [ValueError(f"{type(error).__name__}: {error}")]
        return [result for conversation in conversations for result in self._results([conversation])]


def _finite(score: float) -> Result:
    return score if math.isfinite(score) else ValueError(f"the score is {score}")
