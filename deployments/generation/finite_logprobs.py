"""Whether log-probabilities can be those of sampled tokens. Imports no vLLM."""

import math
from array import array

from deployments.failures import GenerationNotFinite


def refuse_not_finite(logprobs: "array[float]") -> None:
    """Raises `GenerationNotFinite` if one of the log-probabilities (float32) is NaN or infinite.

    Not even -inf can be right: it says that the token has probability 0 under the distribution that it was sampled
    from. With NaN among the logits of a position, the engine returns an arbitrary token.
    """
    # A sum of float32 in float64 does not overflow. For the token of a streamed event NumPy takes twenty times as long.
    if not math.isfinite(sum(logprobs)):
        first = next(place for place, logprob in enumerate(logprobs) if not math.isfinite(logprob))
        raise GenerationNotFinite(
            f"The engine gave {logprobs[first]} as the log-probability of token {first} of {len(logprobs)}."
        )
