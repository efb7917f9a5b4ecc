"""How a model is named to callers."""

import pytest

from deployments.protocols.model_server import public_model_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/data/models/tiny", "tiny"),
        ("/data/models/tiny/", "tiny"),
        ("/data/service/../models/tiny", "tiny"),
        ("org/model", "org/model"),
        ("tiny", "tiny"),
    ],
)
def test_a_folder_is_named_without_where_it_is_and_a_repository_as_it_is(model: str, name: str) -> None:
    assert public_model_name(model) == name
