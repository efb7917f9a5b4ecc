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

pytestmark = pytest.mark.slow

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


def test_every_wrong_setting_is_named_with_its_value() -> None:
    wrong = config(
        engine={"device": "tpu", "model": "models/tiny"},
        limits={"max_body_bytes": "much"},
        policy={"fodler": "/weights"},
    )
    assert refusal(wrong) == [
        "The settings of rollout are wrong:",
        "  args.engine.device: Input should be 'gpu' or 'cpu' (given: 'tpu')",
        "  args.limits.max_body_bytes: Input should be a valid integer, unable to parse string as an integer "
        "(given: 'much')",
        f"  args.policy.fodler: unknown; permitted are {', '.join(PolicySettings.model_fields)} (given: '/weights')",
    ]


JUDGE = "deployments.tasks.llm_judge:LlmJudgeEnvironment"
CONVERSATION = "deployments.tasks.conversation:ConversationEnvironment"
USER = {"models": {"user": {}}, "user_simulator": {"model": "user"}}
KEYED_JUDGE = {"base_url": "http://judge/v1", "model": "m", "api_key_variable": "JUDGE_KEY"}
JUDGED = {"judged": {"import_path": JUDGE, "models": {"judge": KEYED_JUDGE}}}
HARNESS = {"url": "http://harness", "api_key_variable": "NO_SUCH_KEY"}
MINE = "args.environments.mine"
TASKS, SANDBOX = f"{MINE}.agent.harbor.tasks", f"{MINE}.agent.harbor.sandbox"
NIM = {"import_path": "examples.nim:Nim", "rivals": {"api_key_variable": "RIVALS_KEY"}}
DEPLOYMENTS = "is not a deployment of rollout; there are Ingress, Generator, Policy, math."


def engine(**fields: Any) -> dict[str, Any]:
    return {"engine": {"device": "cpu", "model": "models/tiny", **fields}}


def mine(**environment: Any) -> dict[str, Any]:
    return {"environments": {"mine": environment}, "sessions": {}}


def played_by(**agent: Any) -> dict[str, Any]:
    return mine(import_path=MATH, agent=agent)


def harbor(tasks: str, timeout_s: float | None = None, **sandbox: Any) -> dict[str, Any]:
    asked = {"tasks": tasks} | ({"sandbox": sandbox} if sandbox else {})
    agent = {"harbor": asked, "command": {"argv": ["true"], "sandbox": True}}
    return mine(agent=agent | ({} if timeout_s is None else {"timeout_s": timeout_s}))


@pytest.mark.parametrize(
    ("args", "path", "says"),
    [
        (engine(max_num_seq=4), "args.engine.max_num_seq", "unknown; permitted are replica, device, model, tokenizer"),
        (engine(model="org/remote", tokenizer="/no/where"), "args.engine.tokenizer", "there is no /no/where on this"),
        ({"environments": JUDGED}, "args.environments.judged.models.judge.api_key_variable", "JUDGE_KEY holds no key"),
        (mine(agent={"game": NIM}), f"{MINE}.agent.game.rivals", "RIVALS_KEY holds no key"),
        (mine(agent={"game": {"import_path": "examples.nim:Go"}}), f"{MINE}.agent.game", "makes no game: Attribute"),
        (mine(import_path=JUDGE, **USER), f"{MINE}.user_simulator", f"leave it out, or name {CONVERSATION}"),
        (mine(import_path="no.such:Thing"), MINE, "cannot be imported: there is no module no."),
        (mine(import_path=f"{MATH}s"), MINE, "tasks.math has no MathEnvironments."),
        (mine(import_path="pathlib:Path"), MINE, "pathlib:Path is not a TaskEnvironment"),
        (mine(import_path=MATH, arguments={"worker": 2}), MINE, "got an unexpected keyword argument 'worker'"),
        (played_by(import_path="no_such:agent"), f"{MINE}.agent.import_path", "is not package.module:function"),
        (
            played_by(command={"argv": ["no-such-program"]}),
            f"{MINE}.agent.command.argv",
            "no program 'no-such-program'",
        ),
        (played_by(harness=HARNESS), f"{MINE}.agent.harness.api_key_variable", "NO_SUCH_KEY holds no key"),
        (
            harbor(f"{HARBOR_EXAMPLES}/fix-median", timeout_s=180),
            TASKS,
            "bounds the whole rollout, is 180: set it above.",
        ),
        (harbor("/nowhere"), TASKS, "/nowhere is no folder of tasks."),
        (harbor(HARBOR_EXAMPLES, provider="docker", options={"port": 1}), SANDBOX, "takes socket, network, runtime."),
        (harbor(HARBOR_EXAMPLES, provider="harbor"), SANDBOX, "needs the package harbor, which is not installed."),
        ({"deployments": [{"name": "maths"}]}, "deployments", f"maths {DEPLOYMENTS}"),
        ({"deployments": [{"name": "Data"}]}, "deployments", f"Data {DEPLOYMENTS}"),
        ({"access": {"keys_file": "/missing"}}, "access.keys_file", "No such file or directory (/missing)"),
    ],
)
def test_a_refusal_names_its_path(args: dict[str, Any], path: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUDGE_KEY", "RIVALS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    problem, *others = refusal(config(**args))
    assert problem.startswith(path)
    assert says in problem
    # A task in a sandbox has two where this machine has none.
    assert others == [] or path.endswith("harbor.tasks")


@pytest.mark.parametrize(
    "args",
    [{"environments": JUDGED}, mine(import_path=CONVERSATION, arguments={"judge": {"import_path": JUDGE}}, **USER)],
)
def test_what_has_its_key_and_its_user_can_start(args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "x")
    check_config(config(**args))


def test_an_engine_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "engine_fields", lambda: None)
    assert refusal(config()) == [
        "vLLM is not installed in this Python environment: install rollout-service[gpu] or rollout-service[cpu]."
    ]
    check_config(
        config(engine={"model": "models/tiny", "max_model_len": 64, "device": "cpu", "replica": SIMULATED_REPLICA})
    )


def test_packages_of_a_runtime_environment_are_not_looked_for_here() -> None:
    elsewhere = config(environments={"mine": {"import_path": "no.such:Thing"}})
    elsewhere.applications[0].runtime_env = {"pip": ["no"]}
    check_config(elsewhere)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            '{"prompt": "1 + 1?", "extra_env_info": {"ground_truth": "2"}}\n{"prompt": "2?"}\n',
            " line 2: extra_env_info.ground_truth: Field required.",
        ),
        (
            '{"extra_env_info": {"ground_truth": "2"}}\n',
            "it has no messages: name their column under columns.messages.",
        ),
    ],
)
def test_data_that_do_not_suit_their_environment_are_refused(rows: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    [problem] = refusal(config(environments={"math": {"import_path": MATH, "data": {"files": str(path)}}}))
    assert problem.startswith(f"args.environments.math.data: {path}")
    assert problem.endswith(says)


def test_the_deployment_of_data_has_an_entry_where_a_task_has_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1?", "extra_env_info": {"ground_truth": "2"}}\n')
    entry = [{"name": "Data", "ray_actor_options": {"num_cpus": 0.2}}]
    check_config(config(entry, environments={"math": {"import_path": MATH, "data": {"files": str(path)}}}))


def test_a_service_that_others_can_reach_without_a_key_is_refused() -> None:
    exposed = config()
    exposed.http_options.host = "0.0.0.0"
    [problem] = refusal(exposed)
    assert problem.startswith("http_options.host: 0.0.0.0 can be reached from other machines, and the service asks for")
    exposed.applications[0].args["access"] = {"guarded_by": "the port is published on loopback alone"}
    check_config(exposed)


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
def test_each_config_of_ours_can_start(name: str, content: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_engine_problems", lambda _engine: ())
    config = config_of(content, REPOSITORY / name)
    [application] = config.applications
    if "keys_file" in application.args.get("access", {}):
        # A secret of the cluster.
        application.args["access"] = {"guarded_by": "the keys that are not here"}
    check_config(config)
    assert vars(build(ServiceSettings.model_validate(application.args)))["_bound_deployment"].name == "Ingress"


def test_the_configs_of_the_repository_are_found() -> None:
    found = {name for name, _ in configs_of_the_repository()}
    assert found >= {"serve_config.yaml", "serve_config.cpu.yaml", "deploy/kubernetes/rayservice.yaml"}
