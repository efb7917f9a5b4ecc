"""What a notebook shows of a response."""

from tests.clients.data_out.responses import response_of
from tests.clients.scripted_service import CLIPPED, result


def test_the_head_counts_rollouts_and_statuses_and_names_reward_and_version() -> None:
    failed = result(status="error", total_reward=None, error={"kind": "timeout", "message": "Late.", "retryable": True})
    html = response_of(result(), result(total_reward=0.0), failed)._repr_html_()
    assert html.startswith(
        "<p>3 rollouts · 2 completed · 1 error · mean reward 0.500 · clipped ratio 0.000 · version 0</p>"
    )


def test_responses_that_their_length_has_cut_are_in_the_head_and_named_in_their_rows() -> None:
    html = response_of(CLIPPED, result(), result(), result())._repr_html_()
    assert "clipped ratio 0.250" in html
    assert (html.count("<td>length</td>"), html.count("<td>stop</td>")) == (1, 3)


def test_text_of_a_model_is_escaped_and_shortened() -> None:
    html = response_of(result(content="<script>alert(1)</script>" + "x" * 1000))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "x" * 120 not in html


def test_only_the_first_rollouts_are_shown() -> None:
    html = response_of(*[result(idx) for idx in range(10)])._repr_html_()
    assert html.count("<tr>") == 1 + 8
    assert "<p>and 2 more</p>" in html


def test_a_response_without_rollouts_has_a_representation() -> None:
    assert response_of(policy={})._repr_html_().startswith("<p>0 rollouts</p>")
