"""The data set and the agent of `examples/train_agent_harbor.py`, judged under bubblewrap, beside a scripted model."""

import subprocess
from pathlib import Path

import pytest

from deployments.harbor.tasks import HarborSettings, HarborTask, _load_tasks
from examples import harbor_functions
from tests.deployments.agents.test_harbor_program import played, works
from tests.examples.scripted_model import ScriptedModel, says

COUNT = 40


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, HarborTask]:
    harbor_functions.write_tasks(tmp_path, COUNT, seed=1)
    return _load_tasks(HarborSettings(tasks=str(tmp_path)))


def solution(task: HarborTask) -> str:
    """The program that `solve.sh` writes."""
    script = (task.folder / "solution" / "solve.sh").read_text().replace(harbor_functions.FUNCTION_FILE, "/dev/stdout")
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        pytest.param("```python\n{solution}```", 1.0, id="the solution"),
        pytest.param("```python\n{solution}    return 0\n```", 1.0, id="what is never reached"),
        pytest.param("{solution}", 0.0, id="no code block"),
        pytest.param("```python\ndef f(x):\n    return 2\n```", 0.0, id="another function"),
        pytest.param("```python\ndef f(x:\n```", 0.0, id="no Python"),
        pytest.param("```python\nexit()\n```", 0.0, id="a program that ends the verifier's"),
        pytest.param(None, 0.0, id="no text"),
    ],
)
def test_the_verifier_rewards_a_function_that_returns_what_was_asked(
    answer: str | None, reward: float, tmp_path: Path, tasks: dict[str, HarborTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = next(iter(tasks.values()))
    model = ScriptedModel(says(answer and answer.format(solution=solution(task))))
    monkeypatch.setattr(harbor_functions, "connections", lambda: model)
    sample = {
        "task_name": "harbor",
        "messages": [{"role": "user", "content": task.instruction}],
        "extra_env_info": {"task": task.name},
    }
    agent = {"command": None, "import_path": "examples.harbor_functions:agent"}
    rewards, metrics = played(sample, harbor={"tasks": str(tmp_path)}, **agent)
    assert rewards == {"reward": reward}
    assert "agent_failed" not in metrics
    assert model.asked == [[{"role": "user", "content": f"{task.instruction.strip()} Reply with one code block."}]]
    assert model.addresses[0]["api_key"] == "key"
