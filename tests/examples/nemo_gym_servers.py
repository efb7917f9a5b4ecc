"""The servers of NeMo-Gym for one environment: model, resources and agent. Run by a Python that has the package.

    python nemo_gym_servers.py POLICY_BASE_URL MODEL_PORT RESOURCES_PORT AGENT_PORT

`ng_run` starts each server with a Python environment and a Ray of its own. These are the same servers in one process.
"""

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

import uvicorn

policy_base_url, *ports = sys.argv[1:]
model, resources, agent = (
    {"entrypoint": "app.py", "host": "127.0.0.1", "port": int(port), "domain": "other"} for port in ports
)
policy = {"openai_base_url": policy_base_url, "openai_api_key": "any", "openai_model": "any"}
uses = {
    "resources_server": {"type": "resources_servers", "name": "counter"},
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
}
CONFIG: dict[str, Any] = {
    "policy_model": {"responses_api_models": {"openai_model": {**model, **policy}}},
    "counter": {"resources_servers": {"example_session_state_mgmt": {**resources, "verified": False}}},
    "counter_agent": {"responses_api_agents": {"simple_agent": {**agent, **uses, "max_steps": 4}}},
    "head_server": {"host": "127.0.0.1", "port": 1},
    "global_aiohttp_connector_limit": 16,
    "global_aiohttp_connector_limit_per_host": 16,
}
CLASSES = {
    "policy_model": "responses_api_models.openai_model.app:SimpleModelServer",
    "counter": "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer",
    "counter_agent": "responses_api_agents.simple_agent.app:SimpleAgent",
}
os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(CONFIG)


def server(name: str) -> uvicorn.Server:
    from nemo_gym.server_utils import ServerClient, get_global_config_dict

    os.environ["NEMO_GYM_CONFIG_PATH"] = name
    module, _, class_name = CLASSES[name].partition(":")
    server_class = getattr(import_module(module), class_name)
    config = server_class.load_config_from_global_config()
    client = ServerClient(
        head_server_config=ServerClient.load_head_server_config(), global_config_dict=get_global_config_dict()
    )
    app = server_class(config=config, server_client=client).setup_webserver()
    return uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, log_level="warning"))


async def main() -> None:
    await asyncio.gather(*(server(name).serve() for name in CLASSES))


asyncio.run(main())
