"""What is asked of Serve where it does not run."""

import pytest
from ray import serve

from deployments.upstream.ray_serve.serve_internals import application_states


def test_where_serve_does_not_run_there_are_no_applications(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(serve.context, "_get_global_client", lambda **options: asked.append(options))
    assert application_states() == {}
    assert asked == [{"raise_if_no_controller_running": False}]
