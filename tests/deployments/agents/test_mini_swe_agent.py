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
    asked = list[Any]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("post /v1/sessions/s/v1/chat/completions ")
        length = int(head.partition("content-length:")[2].split()[0])
        asked.append(json.loads(await reader.readexactly(length)))
        call = {"name": "bash", "arguments": json.dumps({"command": COMMANDS[len(asked) - 1]})}
        tool_calls = [{"id": f"call-{len(asked)}", "type": "function", "function": call}]
        message = {"role": "assistant", "content": "Next.", "tool_calls": tool_calls}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        body = {"id": "a", "object": "chat.completion", "created": 1, "model": "any", "choices": choices}
        content = json.dumps(body).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close"
        writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()

    async def run() -> dict[str, float]:
        command: Any = {
            "argv": ["bash", "-c", RUNS],
            "sandbox": True,
            "folders": [FOLDER],
            "environment_variables": VARIABLES,
        }
        settings = AgentSettings.model_validate({"harbor": {"tasks": str(TASKS)}, "command": command})
        assert settings.harbor is not None
        program = HarborProgram(settings, settings.harbor)
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as service:
            base_url = f"http://127.0.0.1:{service.sockets[0].getsockname()[1]}/v1/sessions/s"
            sample: Any = {"task_name": "swe", "extra_env_info": {"task": "examples/fix-median"}}
            return await program.run(AgentCall(base_url=base_url, api_key="key", sample=sample), RunNotes())

    assert asyncio.run(run()) == {"reward": 1.0}
    assert "Repair it." in json.dumps(asked[0]["messages"])
    assert "sorted(numbers)[len(numbers) // 2]" in json.dumps(asked[1]["messages"][-1])
