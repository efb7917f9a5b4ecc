"""Models whose images cannot be carried token-exactly: refused when the engine starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.generation.engine_images import EngineImages, ImagesUnsupported
from tests.fakes.image_store import ImagesInProcess


@pytest.mark.parametrize(
    ("sees", "both_ways", "refusal"),
    [
        (False, False, r"^m sees no images: leave images out of the config\.$"),
        (
            True,
            True,
            r"attend to those behind them in m, which vLLM's build for processors leaves out: .* on a GPU, or",
        ),
    ],
)
def test_a_model_that_cannot_be_served_with_images_here_is_refused(sees: bool, both_ways: bool, refusal: str) -> None:
    config = SimpleNamespace(model="m", is_multimodal_model=sees, is_mm_prefix_lm=both_ways)
    llm: Any = SimpleNamespace(model_config=config)
    with pytest.raises(ImagesUnsupported, match=refusal):
        EngineImages(llm, ImagesInProcess())
