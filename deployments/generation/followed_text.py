"""The text of a stream that several requests of the engine make, where one of them ends within a character or a stop
string. No I/O.

The engine's text of a request knows no tokens of the requests before it. Here vLLM's own detokenizer gets the tokens of
all of them: so characters, stop strings and what is held back for these are as they are without an interruption.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class FollowedText:
    def __init__(
        self, tokenizer: Any, prompt_token_ids: list[int], params: SamplingParams, token_ids: Sequence[int]
    ) -> None:
        """Args: `token_ids` are those of the requests that have ended, which hold no stop string."""
        request: Any = SimpleNamespace(
            request_id="", prompt_token_ids=prompt_token_ids, prompt_embeds=None, sampling_params=params
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self.stop_string: str | None = None
        """The one that has ended the text."""
        self.add(token_ids, ends_by_token=False)

    def add(self, token_ids: Sequence[int], ends_by_token: bool) -> int:
        """How many of the tokens belong to the text: it ends with the one that completes a stop string.

        Args:
            ends_by_token: whether the last one is a token that ends a response.
        """
        if self.stop_string is not None:
            return 0
        for place, token_id in enumerate(token_ids):
            is_end = ends_by_token and place == len(token_ids) - 1
            self.stop_string = self._detokenizer.update([token_id], is_end)
            if self.stop_string is not None:
                return place + 1
        return len(token_ids)

    def text(self, has_ended: bool) -> str:
        """All of it; before its end without what can be the beginning of a stop string that is not shown."""
        return self._detokenizer.get_next_output_text(finished=has_ended, delta=False)
