"""mini-swe-agent from PyPI plays a task of Harbor, in a sandbox, with a model that answers as it is told.

`ROLLOUT_MINI_SWE_AGENT` names the folder into which `pip install --target` has put it; without it this is skipped.
"""

import asyncio
import json
import os
from typing import Any

import pytest

from deployments.agents.harbor_program import HarborProgram
from deployments.agents.programs import AgentCall, RunNotes
from deployments.agents.settings import AgentSettings
from tests.deployments.agents.harbor_rollouts import TASKS, solution
from tests.deployments.models.chat_server import Answer, chat_server, said

FOLDER = os.environ.get("ROLLOUT_MINI_SWE_AGENT", "")
RUNS = (
    'exec python3 -m minisweagent.run.mini -m openai/any -t "$(cat $ROLLOUT_INSTRUCTION_FILE)" -y --exit-immediately '
    "-l 0 -o /logs/agent/trajectory.json"
)
VARIABLES = {
    "PYTHONPATH": FOLDER,
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
COMMANDS = ("cat /app/statistics_of.py", solution("fix-median"), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.skipif(not FOLDER, reason="ROLLOUT_MINI_SWE_AGENT names no folder")
def test_mini_swe_agent_plays_a_task_unmodified() -> None:
    def answer(number: int, _body: dict[str, Any]) -> Answer:
        call = {"name": "bash", "arguments": json.dumps({"command": COMMANDS[number]})}
        return said("Next.", tool_calls=[{"id": f"call-{number}", "type": "function", "function": call}])

    command: Any = {"argv": ["bash", "-c", RUNS], "sandbox": True, "folders": [FOLDER]}
    command["environment_variables"] = VARIABLES
    settings = AgentSettings.model_validate({"harbor": {"tasks": str(TASKS)}, "command": command})
    assert settings.harbor is not None
    sample: Any = {"task_name": "swe", "extra_env_info": {"task": "examples/fix-median"}}
    with chat_server(answer) as server:
        call = AgentCall(base_url=f"{server.url}/sessions/s", api_key="key", sample=sample)
        reward = asyncio.run(HarborProgram(settings, settings.harbor).run(call, RunNotes()))
    assert reward == {"reward": 1.0}
    assert {request["path"] for request in server.requests} == {"/v1/sessions/s/v1/chat/completions"}
    asked = [request["messages"] for request in server.requests]
    assert "Repair it." in json.dumps(asked[0])
    assert "sorted(numbers)[len(numbers) // 2]" in json.dumps(asked[1][-1])
