"""The tasks for a small language model."""

from examples.easy_questions import LargerNumberEnvironment
from examples.task_configs import config_for, tasks_of
from rollout_env import play
from tests.paths import REPOSITORY, SMOLLM2


def test_the_larger_number_of_two_is_right() -> None:
    environment = LargerNumberEnvironment(workers=1)
    played = play(environment, ["98"], sample=0)
    asked, _, _ = (message["content"] for message in played.message_log[-3:])
    assert asked == "Which number is larger, 50 or 98?"
    assert played.total_reward == 1.0
    assert play(environment, ["50"], sample=0).total_reward == 0.0
    environment.close()


def test_the_tasks_of_smollm2_are_served_on_the_port_that_is_named() -> None:
    tasks = tasks_of(SMOLLM2)
    config = config_for(REPOSITORY / "serve_config.cpu.yaml", SMOLLM2, tasks, port=8765)
    assert config.http_options.port == 8765
    assert list(config.applications[0].args["environments"]) == [*tasks]
    assert config.applications[0].args["engine"]["model"] == str(SMOLLM2)
