"""Whether log-probabilities can be those of sampled tokens. Imports no vLLM."""

from array import array

import numpy as np

from deployments.failures import GenerationNotFinite


def refuse_not_finite(logprobs: "array[float]") -> None:
    """Raises `GenerationNotFinite` if one of the log-probabilities (float32) is NaN or infinite.

    Not even -inf can be right: it says that the token has probability 0 under the distribution that it was sampled
    from. With NaN among the logits of a position, the engine returns an arbitrary token.
    """
    finite = np.isfinite(np.asarray(logprobs))
    if not finite.all():
        first = int(finite.argmin())
        raise GenerationNotFinite(
            f"The engine gave {logprobs[first]} as the log-probability of token {first} of {len(logprobs)}."
        )
