"""No import path, file, URL, host or pickle that a request names is followed, whichever route and field it is sent to.

Python's audit events show what the process opens, connects to, imports, unpickles and runs.
"""

import ast
import asyncio
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from tests.paths import REPOSITORY
from tests.service.openapi_document import OPERATIONS
from tests.service.scripted_http import ScriptedHttp

MARK = "followedmark"
NAMES = (
    f"{MARK}.module:Class",
    f"/tmp/{MARK}/file",
    f"../../../../tmp/{MARK}",
    f"file:///tmp/{MARK}",
    f"http://{MARK}.invalid/weights",
    f"s3://{MARK}/weights",
    f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}} {MARK}",
)
SEEN = ("open", "import", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "pickle.find_class")
WITH_BODY = [name for name, operation in OPERATIONS.items() if "requestBody" in operation]
WITH_JSON = [name for name in WITH_BODY if "application/json" in OPERATIONS[name]["requestBody"]["content"]]


class Watch:
    """Python's audit hooks cannot be taken away again: this one rests while nothing is watched."""

    def __init__(self) -> None:
        self.is_watching = False
        self.seen: list[str] = []

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_watching and event in SEEN:
            self.seen.append(f"{event} {arguments}")


WATCH = Watch()
sys.addaudithook(WATCH.note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what happens in the block."""
    WATCH.seen = []
    WATCH.is_watching = True
    try:
        yield WATCH.seen
    finally:
        WATCH.is_watching = False


def example_body(name: str) -> Any:
    return OPERATIONS[name]["requestBody"]["content"]["application/json"]["example"]


def with_names(document: Any, name: str) -> Iterator[Any]:
    """The document with one value after the other replaced by `name`, and with one more field of that value."""
    if isinstance(document, dict):
        yield {**document, "import_path": name}
        yield {**document, "chat_template": name}
        for key, value in document.items():
            yield {**document, key: name}
            yield from ({**document, key: changed} for changed in with_names(value, name))
    elif isinstance(document, list):
        for position, value in enumerate(document):
            for changed in (name, *with_names(value, name)):
                yield [*document[:position], changed, *document[position + 1 :]]


@pytest.mark.parametrize("route", WITH_JSON)
def test_no_value_of_a_body_is_followed(route: str) -> None:
    method, path = route.split(" ")
    url = path.replace("{version}", "7").replace("{name}", "x")

    async def send(http: AsyncClient) -> None:
        for name in NAMES:
            for body in with_names(example_body(route), name):
                await http.request(method, url, json=body)

    with watched() as happened:
        asyncio.run(ScriptedHttp().asked(send))
    assert [event for event in happened if MARK in event] == []


@pytest.mark.parametrize("route", OPERATIONS)
def test_no_parameter_is_followed(route: str) -> None:
    method, path = route.split(" ")
    parameters = [each for each in OPERATIONS[route].get("parameters", []) if "name" in each]

    async def send(http: AsyncClient) -> None:
        for name in NAMES:
            encoded = name.replace("/", "%2F").replace(" ", "%20")
            url = path.replace("{version}", "7")
            for each in parameters:
                url = url.replace(f"{{{each['name']}}}", encoded)
            query = {each["name"]: name for each in parameters if each["in"] == "query"}
            headers = {each["name"]: name for each in parameters if each["in"] == "header"} | {
                "Referer": name,
                "X-Forwarded-Host": name,
                "Forwarded": f"host={name}",
            }
            await http.request(method, url, params=query, headers=headers)

    with watched() as happened:
        asyncio.run(ScriptedHttp().asked(send))
    assert [event for event in happened if MARK in event] == []


def test_the_watch_sees_what_it_must_see(tmp_path: Path) -> None:
    with watched() as happened:
        pickle.loads(pickle.dumps(Path(tmp_path, MARK)))
        with pytest.raises(FileNotFoundError):
            Path(tmp_path, MARK).read_text()
    assert [event.split(" ")[0] for event in happened if MARK in event or "find_class" in event] == [
        "pickle.find_class",
        "open",
    ]


READS_PICKLES: dict[str, str] = {
    "deployments/rollout_records/store.py": "records that ingress replicas have written",
    "service/rollout_records/recorder.py": "records that ingress replicas have written",
    "service/rollout_requests/body_parser.py": "answers of the processes that parse bodies, its own children",
}
"""Files that may call `pickle.loads`, and whose bytes these are."""
LOADERS = {"loads", "load", "Unpickler"}
PICKLERS = {"pickle", "cloudpickle", "_pickle", "dill", "marshal", "joblib", "shelve", "torch"}


def is_loader(node: ast.AST) -> bool:
    """Whether the node names a function that reads pickles, or the like."""
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return module in PICKLERS and name in LOADERS
        case ast.ImportFrom(module=module, names=names):
            return module in PICKLERS and bool({each.name for each in names} & LOADERS)
    return False


def test_only_bytes_of_the_services_own_processes_are_unpickled() -> None:
    found = set()
    for room in ("service", "deployments", "clients/rollout_client", "clients/rollout_env"):
        for file in (REPOSITORY / room).rglob("*.py"):
            code = file.read_text()
            if any(name in code for name in PICKLERS) and any(is_loader(node) for node in ast.walk(ast.parse(code))):
                found.add(str(file.relative_to(REPOSITORY)))
    assert found == set(READS_PICKLES)
