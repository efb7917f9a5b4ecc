"""What is found to be wrong with a config before anything is started."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.policy.settings import PolicySettings
from service.app import build
from service.settings import ServiceSettings
from service.startup import preflight
from service.startup.config import APP_BUILDER, ServiceNotStarted, config_of
from service.startup.preflight import check_config
from tests.paths import REPOSITORY, SIMULATED_REPLICA

MATH = "deployments.tasks.math:MathEnvironment"
HARBOR_EXAMPLES = str(REPOSITORY / "examples" / "harbor")


def config(deployments: list[dict[str, Any]] | None = None, **args: Any) -> ServeDeploySchema:
    everything = {
        "engine": {"device": "cpu", "model": "models/tiny", "num_cpus": 0.5},
        "environments": {"math": {"import_path": MATH}},
        "jobs": None,
    }
    application = {
        "name": "rollout",
        "import_path": "service.app:build",
        "args": everything | args,
        "deployments": deployments or [],
    }
    return ServeDeploySchema.model_validate({"http_options": {"host": "127.0.0.1"}, "applications": [application]})


def refusal(refused: ServeDeploySchema) -> list[str]:
    with pytest.raises(ServiceNotStarted) as raised:
        check_config(refused)
    return str(raised.value).splitlines()


def test_every_wrong_setting_is_named_with_its_value_and_the_permitted_names() -> None:
    wrong = config(
        engine={"device": "tpu", "model": "models/tiny"},
        limits={"max_body_bytes": "much"},
        policy={"fodler": "/weights"},
        enviroments={},
    )
    assert refusal(wrong) == [
        "The settings of rollout are wrong:",
        "  args.engine.device: Input should be 'gpu' or 'cpu' (given: 'tpu')",
        "  args.limits.max_body_bytes: Input should be a valid integer, unable to parse string as an integer "
        "(given: 'much')",
        f"  args.policy.fodler: unknown; permitted are {', '.join(PolicySettings.model_fields)} (given: '/weights')",
        "  args.enviroments: unknown; permitted are engine, environments, reward_models, responses, access, limits, "
        "admission, scheduling, policy, jobs, metrics, tracing, sessions, images, rollout_records",
    ]


def test_an_engine_field_that_vllm_does_not_know_is_refused() -> None:
    assert refusal(config(engine={"device": "cpu", "model": "models/tiny", "max_num_seq": 4})) == [
        "args.engine.max_num_seq: unknown; permitted are replica, device, model, tokenizer, revision, "
        "tokenizer_revision, trust_remote_code, split_special_tokens, tensor_parallel_size, pipeline_parallel_size, "
        "max_model_len, seed, enable_lora, max_lora_rank, num_cpus, hang_timeout_s, "
        "grammar_time_limit_s, environment_variables and the fields of vLLM's AsyncEngineArgs."
    ]


def test_a_model_whose_key_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"base_url": "http://judge/v1", "model": "m", "api_key_variable": "JUDGE_KEY"}
    path = "deployments.tasks.llm_judge:LlmJudgeEnvironment"
    judged = {"judged": {"import_path": path, "models": {"judge": judge}}}
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert refusal(config(environments=judged)) == [
        "args.environments.judged.models.judge.api_key_variable: the environment variable JUDGE_KEY holds no key: "
        "set it where the service starts"
    ]
    monkeypatch.setenv("JUDGE_KEY", "x")
    check_config(config(environments=judged))


def test_a_game_that_cannot_be_made_or_has_no_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIVALS_KEY", raising=False)
    nim = {"import_path": "examples.nim:Nim", "rivals": {"api_key_variable": "RIVALS_KEY"}}
    assert refusal(config(sessions={}, environments={"nim": {"agent": {"game": nim}}})) == [
        "args.environments.nim.agent.game.rivals.api_key_variable: the environment variable RIVALS_KEY holds no key: "
        "set it where the service starts"
    ]
    gone = {"import_path": "examples.nim:Go"}
    [problem] = refusal(config(sessions={}, environments={"nim": {"agent": {"game": gone}}}))
    assert problem.startswith("args.environments.nim.agent.game: examples.nim:Go makes no game: Attribute")


def test_a_user_for_an_environment_that_talks_to_none_is_refused() -> None:
    user = {"models": {"user": {}}, "user_simulator": {"model": "user"}}
    path = "deployments.tasks.llm_judge:LlmJudgeEnvironment"
    assert refusal(config(environments={"alone": {"import_path": path, **user}})) == [
        f"args.environments.alone.user_simulator: {path} talks to no user (it has no use_user): leave it out, or name "
        "deployments.tasks.conversation:ConversationEnvironment with this one as its judge."
    ]
    talks = {"import_path": "deployments.tasks.conversation:ConversationEnvironment", **user}
    check_config(config(environments={"talks": talks | {"arguments": {"judge": {"import_path": path}}}}))


def test_an_engine_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "engine_fields", lambda: None)
    assert refusal(config()) == [
        "vLLM is not installed in this Python environment: install rollout-service[gpu] or rollout-service[cpu]."
    ]
    check_config(
        config(engine={"model": "models/tiny", "max_model_len": 64, "device": "cpu", "replica": SIMULATED_REPLICA})
    )


def test_a_model_folder_that_is_not_there_is_refused() -> None:
    assert refusal(config(engine={"device": "cpu", "model": "org/remote", "tokenizer": "/no/where"})) == [
        "args.engine.tokenizer: there is no /no/where on this machine."
    ]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"import_path": "no.such:Thing"}, "no.such:Thing cannot be imported: there is no module no."),
        ({"import_path": f"{MATH}s"}, "module deployments.tasks.math has no MathEnvironments."),
        ({"import_path": "pathlib:Path"}, "pathlib:Path is not a TaskEnvironment"),
        ({"import_path": MATH, "arguments": {"worker": 2}}, "got an unexpected keyword argument 'worker'"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_refused(environment: dict[str, Any], says: str) -> None:
    [problem] = refusal(config(environments={"mine": environment}))
    assert problem.startswith("args.environments.mine: ")
    assert says in problem


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"import_path": "no_such:agent"}, "agent.import_path: no_such:agent is not package.module:function"),
        ({"command": {"argv": ["no-such-program"]}}, "agent.command.argv: there is no program 'no-such-program'"),
        (
            {"harness": {"url": "http://harness", "api_key_variable": "NO_SUCH_KEY"}},
            "agent.harness.api_key_variable: the environment variable NO_SUCH_KEY holds no key: set it where the "
            "service starts",
        ),
    ],
)
def test_an_agent_that_cannot_run_is_refused(agent: dict[str, Any], says: str) -> None:
    [problem] = refusal(config(sessions={}, environments={"mine": {"import_path": MATH, "agent": agent}}))
    assert problem.startswith("args.environments.mine.")
    assert says in problem


def test_packages_of_an_application_with_its_own_runtime_environment_are_not_looked_for_here() -> None:
    elsewhere = config(environments={"mine": {"import_path": "no.such:Thing"}})
    elsewhere.applications[0].runtime_env = {"pip": ["no"]}
    check_config(elsewhere)


def test_a_deployment_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert refusal(config([{"name": "maths"}])) == [
        "deployments: maths is not a deployment of rollout; there are Ingress, Generator, Policy, math."
    ]


def test_data_whose_rows_the_environment_does_not_accept_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1?", "extra_env_info": {"ground_truth": "2"}}\n{"prompt": "2?"}\n')
    assert refusal(config(environments={"math": {"import_path": MATH, "data": {"files": str(path)}}})) == [
        f"args.environments.math.data: {path} line 2: extra_env_info.ground_truth: Field required."
    ]


def test_data_without_messages_suit_only_an_environment_that_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"extra_env_info": {"ground_truth": "2"}}\n')
    [problem] = refusal(config(environments={"math": {"import_path": MATH, "data": {"files": str(path)}}}))
    assert problem.endswith("it has no messages: name their column under columns.messages.")


def test_wrong_settings_of_data_are_named() -> None:
    assert refusal(config(environments={"math": {"import_path": MATH, "data": {"columns": {"reward": "x"}}}})) == [
        "The settings of rollout are wrong:",
        "  args.environments.math.data: give either files or hub",
    ]
    for target in ("status", "idx.y"):
        data = {"files": "a.jsonl", "columns": {target: "x"}}
        [_, problem] = refusal(config(environments={"math": {"import_path": MATH, "data": data}}))
        assert problem == (
            f"  args.environments.math.data: columns.{target}: a sample cannot have this field; give it another name"
        )


def test_the_deployment_of_data_has_an_entry_only_if_a_task_has_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1?", "extra_env_info": {"ground_truth": "2"}}\n')
    entry = [{"name": "Data", "ray_actor_options": {"num_cpus": 0.2}}]
    check_config(config(entry, environments={"math": {"import_path": MATH, "data": {"files": str(path)}}}))
    assert refusal(config(entry)) == [
        "deployments: Data is not a deployment of rollout; there are Ingress, Generator, Policy, math."
    ]


def test_a_service_that_others_can_reach_without_a_key_is_refused() -> None:
    exposed = config()
    exposed.http_options.host = "0.0.0.0"
    [problem] = refusal(exposed)
    assert problem.startswith("http_options.host: 0.0.0.0 can be reached from other machines, and the service asks for")
    exposed.applications[0].args["access"] = {"guarded_by": "the port is published on loopback alone"}
    check_config(exposed)


def test_a_file_of_keys_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    problem = f"access.keys_file: No such file or directory ({missing})"
    assert refusal(config(access={"keys_file": str(missing)})) == [problem]


@pytest.mark.parametrize(
    ("proxy", "certificate", "refused"), [("1", True, True), ("0", True, False), ("1", False, False)]
)
def test_a_certificate_that_haproxy_would_not_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, proxy: str, certificate: bool, refused: bool
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", proxy)
    asked = config()
    if certificate:
        asked.http_options.ssl_keyfile, asked.http_options.ssl_certfile = "/etc/tls.key", "/etc/tls.crt"
    if not refused:
        check_config(asked)
        return
    assert refusal(asked) == [
        "http_options.ssl_certfile: /etc/tls.crt is not used with RAY_SERVE_ENABLE_HA_PROXY=1, because HAProxy serves "
        "without TLS. Unset one of them, and with HAProxy end TLS at a gateway in front."
    ]


def configs_of_the_repository() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every tracked file that is a Serve config of the service, or holds one for Kubernetes."""
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True
    )
    for name in listed.stdout.split():
        text = (REPOSITORY / name).read_text()
        if name.startswith("deploy/") and "serveConfigV2" in text:
            documents = filter(None, yaml.safe_load_all(text))
            [text] = [each["spec"]["serveConfigV2"] for each in documents if each.get("kind") == "RayService"]
        if APP_BUILDER in text:
            yield name, yaml.safe_load(text)


@pytest.mark.parametrize(("name", "content"), [pytest.param(*each, id=each[0]) for each in configs_of_the_repository()])
def test_each_config_of_the_repository_can_start(
    name: str, content: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_engine_problems", lambda _engine: ())
    config = config_of(content, REPOSITORY / name)
    [application] = config.applications
    if "keys_file" in application.args.get("access", {}):
        # A secret of the cluster.
        application.args["access"] = {"guarded_by": "the keys that are not here"}
    check_config(config)
    built = build(ServiceSettings.model_validate(application.args))
    assert built._bound_deployment.name == "Ingress"


def test_the_configs_of_the_repository_are_found() -> None:
    found = {name for name, _ in configs_of_the_repository()}
    assert found >= {"serve_config.yaml", "serve_config.cpu.yaml", "deploy/kubernetes/rayservice.yaml"}


@pytest.mark.parametrize(
    ("harbor", "says"),
    [
        (
            {"tasks": f"{HARBOR_EXAMPLES}/fix-median"},
            f"agent.harbor.tasks: {HARBOR_EXAMPLES}/fix-median/task.toml: agent.timeout_sec and verifier.timeout_sec "
            "are 180 s together, and the agent's timeout_s, which bounds the whole rollout, is 180: set it above.",
        ),
        ({"tasks": "/nowhere"}, "agent.harbor.tasks: /nowhere is no folder of tasks."),
        (
            {
                "tasks": str(REPOSITORY / "examples" / "harbor"),
                "sandbox": {"provider": "docker", "options": {"port": 1}},
            },
            "agent.harbor.sandbox: options: got an unexpected keyword argument 'port'; the provider docker takes "
            "socket, network, runtime.",
        ),
        (
            {"tasks": str(REPOSITORY / "examples" / "harbor"), "sandbox": {"provider": "harbor"}},
            "agent.harbor.sandbox: the provider harbor needs the package harbor, which is not installed.",
        ),
    ],
)
def test_tasks_and_sandboxes_of_harbor_that_cannot_be_used_are_refused(harbor: dict[str, Any], says: str) -> None:
    agent: dict[str, Any] = {"harbor": harbor, "command": {"argv": ["true"], "sandbox": True}}
    agent |= {"timeout_s": 180} if harbor["tasks"].endswith("fix-median") else {}
    assert refusal(config(sessions={}, environments={"mine": {"agent": agent}}))[0] == f"args.environments.mine.{says}"
