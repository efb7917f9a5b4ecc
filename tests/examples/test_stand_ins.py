"""Stand-ins for judges and servers, as a demo has them."""

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from deployments.models.clients import HttpChatModel
from deployments.models.settings import ChatModelSettings
from deployments.tasks.llm_judge import LlmJudgeEnvironment
from examples.stand_ins import SERVERS, stand_in_server, stand_ins
from examples.task_configs import config_for
from rollout_env import aplay
from tests.paths import REPOSITORY


@pytest.mark.slow
def test_the_judge_of_a_demo_is_served_and_judges_by_words() -> None:
    async def scenario(url: str) -> list[float]:
        judge = HttpChatModel(ChatModelSettings.model_validate({"base_url": url, "model": "m"}), "judge")
        environment = LlmJudgeEnvironment()
        environment.use_models({"judge": judge}, {})
        return [(await aplay(environment, [reply], 0)).total_reward for reply in ("", "word " * 10, "word " * 99)]

    config = config_for(REPOSITORY / "serve_config.cpu.yaml", Path("models/tiny"), ["llm_judge"])
    with stand_ins(config) as served:
        url = served.applications[0].args["environments"]["llm_judge"]["models"]["judge"]["base_url"]
        assert asyncio.run(scenario(url)) == [0.0, 0.5, 1.0]


@pytest.mark.slow
def test_a_server_of_a_demo_runs_for_the_length_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVERS, "mcp_server", Path(sys.executable))
    with stand_in_server("mcp_server") as url:
        httpx.get(url, trust_env=False)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
