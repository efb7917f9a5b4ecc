"""A sequence-classification model, by transformers. Imports torch when a model is loaded."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from deployments.chat.text_encoder import TextEncoder
from deployments.chat.tokenizer_loading import load_tokenizer
from deployments.models.reward_batches import batches
from deployments.models.settings import RewardModelSettings
from rollout_env import ChatMessage

PROBE = "Question"


class ClassificationModel:
    """Scores conversations. One thread at a time may use it."""

    def __init__(self, settings: RewardModelSettings) -> None:
        """Loads the model.

        Raises:
            UnsupportedTokenizer: see `load_tokenizer`.
            ValueError: it has no such label, or no token to pad with.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        self._settings = settings
        self._device = "cuda" if settings.device == "gpu" else "cpu"
        self._tokenizer: Any = load_tokenizer(settings.model)
        self._encoder = TextEncoder(self._tokenizer)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype)
        )
        self._model = model.eval().to(self._device)
        labels = self._model.config.num_labels
        if settings.label >= labels:
            raise ValueError(f"label {settings.label} is not below {labels}, the number of labels of {settings.model}")
        self._pad_token_id = self._padding_token()
        # A decoder model looks for the last token that is no padding: that of the tokenizer and its own must be one.
        self._model.config.pad_token_id = self._pad_token_id

    def _padding_token(self) -> int:
        known = (self._model.config.pad_token_id, self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        for token_id in known:
            if token_id is not None:
                return int(token_id)
        raise ValueError(f"neither {self._settings.model} nor its tokenizer names a token to pad with")

    def tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The conversation as the model reads it: by its chat template, or one line a message if it has none.

        Control tokens that the conversation spells are ordinary text.
        """
        control_tokens = self._encoder.control_tokens
        if self._tokenizer.chat_template is not None:
            hidden = control_tokens.hidden_in_prompt(messages, "all", echoes_answers=True)
            rendered = str(self._tokenizer.apply_chat_template([*hidden], tokenize=False))
            ids = self._encoder.encode(control_tokens.restored(rendered)).ids
        else:
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            before, after = self._frame
            ids = [*before, *self._encoder.encode(control_tokens.all_data(text)).ids, *after]
        return ids[-self._settings.max_length :] or [self._pad_token_id]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        inner = self._encoder.encode(PROBE).ids
        whole: list[int] = self._tokenizer.encode(PROBE)
        start = next(place for place in range(len(whole)) if whole[place : place + len(inner)] == inner)
        return whole[:start], whole[start + len(inner) :]

    def scores(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        """The score of each conversation, given as token ids.

        Those that are not finite stay as they are: the caller fails their samples alone.
        """
        scores = [math.nan] * len(conversations)
        bounds = self._settings.max_batch_size, self._settings.max_batch_tokens
        for batch in batches([len(ids) for ids in conversations], *bounds):
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
