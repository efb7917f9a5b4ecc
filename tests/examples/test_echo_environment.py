"""The smallest environment, tested as its author would."""

import pytest

from examples.echo_environment import EchoEnvironment
from rollout_env import check, play
from tests.paths import REPOSITORY


def test_the_word_ends_the_rollout_with_a_reward() -> None:
    played = play(EchoEnvironment(), ["Hi.", "hello0!", "hello0"], sample=0)
    assert [outcome.reward for outcome in played.outcomes] == [0.0, 1.0]
    said = [message["content"] for message in played.message_log]
    assert said == ["Say hello0.", "Hi.", "No. Try again.", "hello0!", "Thanks."]
    assert played.terminated


def test_it_keeps_the_rules_for_environments() -> None:
    check(EchoEnvironment, replies=lambda sample: ["No.", sample["extra_env_info"]["word"]])


@pytest.mark.parametrize(("example", "page"), [("echo_environment", "environments"), ("asking_agent", "agents")])
def test_the_documentation_shows_the_same_code(example: str, page: str) -> None:
    _, _, code = (REPOSITORY / "examples" / f"{example}.py").read_text().split('"""', 2)
    assert f"```python\n{code.strip()}\n```" in (REPOSITORY / "docs" / f"{page}.md").read_text()
