"""A hook of mkdocs: writes the reference pages that follow from the code, so that they cannot say anything else."""

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import rollout_client
import rollout_client.errors
from deployments import failures
from deployments.failures import StoreFailure
from deployments.images.book import ImageFailure
from deployments.jobs.records import JobFailure
from deployments.policy.failures import PolicyFailure
from deployments.sessions.records import SessionFailure
from rollout_client.cli.app import app as command_line
from service import problems
from service.access.keys import KeysFile
from service.problems import TYPE_PREFIX, ProblemType
from service.routes.http_app import build_http_app
from service.settings import ServiceSettings

Schema = dict[str, Any]
STORE_FAILURES: dict[str, type[StoreFailure]] = {
    "Of a change of the weights": PolicyFailure,
    "Of a job": JobFailure,
    "Of a session": SessionFailure,
    "Of an image": ImageFailure,
}
"""By the heading of their part of the page of errors."""
CLIENT_PARTS = {
    "client.jobs": "rollout_client.calls.sync_client.jobs.Jobs",
    "client.policy": "rollout_client.calls.sync_client.policy.Policy",
    "client.sessions": "rollout_client.calls.sync_client.sessions.Sessions",
    "Session": "rollout_client.calls.sync_client.sessions.Session",
}
CLIENT_MODULES = (
    "results",
    "errors",
    "retry",
    "tensors",
    "data_out.export",
    "contract.rollouts",
    "contract.messages",
    "contract.selection",
    "contract.policy",
    "contract.jobs",
    "contract.sessions",
    "contract.records",
    "contract.info",
    "contract.base",
)
"""Modules from which users import beside the names of the package."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "http": http_page(),
        "python": python_page(),
        "command-line": command_line_page(),
        "settings": settings_page(),
        "errors": errors_page(),
    }
    for name, lines in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines)))
    return files


def http_page() -> Iterator[str]:
    document = build_http_app(None).openapi()  # type: ignore[arg-type]  # nothing is called
    yield "# HTTP"
    yield f"\n{document['info'].get('description', '')}\n"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from operation_section(method, path, operation, document)
    yield "## Types\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"### {name}\n"
        yield schema.get("description", "")
        yield from property_table(schema)


def operation_section(method: str, path: str, operation: Schema, document: Schema) -> Iterator[str]:
    yield f"## `{method.upper()} {path}`\n"
    yield operation.get("description") or operation.get("summary", "")
    if parameters := operation.get("parameters"):
        yield "\n| parameter | in | type | meaning |\n| --- | --- | --- | --- |"
        for parameter in (resolved(parameter, document) for parameter in parameters):
            meaning = cell(parameter.get("description", ""))
            yield f"| `{parameter['name']}` | {parameter['in']} | {type_of(parameter['schema'])} | {meaning} |"
    if body := operation.get("requestBody"):
        yield "\n**Body**\n"
        yield from media_types(body["content"])
    yield "\n| status | meaning | body |\n| --- | --- | --- |"
    for status, referenced in operation["responses"].items():
        response = resolved(referenced, document)
        bodies = ", ".join(
            f"`{media_type}` {type_of(content.get('schema', {}))}".strip()
            for media_type, content in response.get("content", {}).items()
        )
        yield f"| {status} | {cell(response.get('description', ''))} | {bodies} |"
    yield ""


def resolved(schema: Schema, document: Schema) -> Schema:
    """What a `$ref` of the document refers to; a schema without one as it is."""
    for part in schema.get("$ref", "#").split("/")[1:]:
        document = document[part]
    return document if "$ref" in schema else schema


def media_types(contents: Schema) -> Iterator[str]:
    for media_type, content in contents.items():
        yield f"- `{media_type}`: {type_of(content.get('schema', {}))}"


def property_table(schema: Schema) -> Iterator[str]:
    properties = schema.get("properties")
    if not properties:
        yield ""
        return
    yield "\n| field | type | meaning |\n| --- | --- | --- |"
    required = set(schema.get("required", ()))
    for name, field in properties.items():
        needed = " (required)" if name in required else default_of(field)
        yield f"| `{name}` | {type_of(field)}{needed} | {cell(field.get('description', ''))} |"
    yield ""


def default_of(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None or isinstance(default, dict | list) else f", default `{default}`"


def type_of(schema: Schema) -> str:
    """A schema in words: `[Sampling](#sampling) or null`, `array of integer`."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2].lstrip("_")
        return f"[{name}](#{name.lower()})"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return " or ".join(dict.fromkeys(type_of(option) for option in schema[choice]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"array of {type_of(schema.get('items', {}))}"
    if isinstance(values := schema.get("additionalProperties"), dict) and values:
        return f"object of {type_of(values)}"
    return str(schema.get("format") or schema.get("type") or "any")


def python_page() -> Iterator[str]:
    yield "# Python client\n"
    yield "`rollout_client` exports the names of the first part. The others are imported from their modules.\n"
    yield "## rollout_client\n"
    for name in sorted(set(rollout_client.__all__) - {"__version__"}, key=str.lower):
        value = getattr(rollout_client, name)
        yield from object_section(name, f"{value.__module__}.{value.__qualname__}")
    yield "## Parts of a client\n"
    for name, path in CLIENT_PARTS.items():
        yield from object_section(name, path)
    yield "## Modules\n"
    for module in CLIENT_MODULES:
        yield from object_section(f"rollout_client.{module}", f"rollout_client.{module}")


def object_section(heading: str, path: str) -> Iterator[str]:
    """What mkdocstrings writes of the object at `path`: its methods with those of its bases."""
    yield f"::: {path}"
    yield "    options:"
    yield f"      heading: {heading}"
    yield f"      toc_label: {heading}"
    yield "      heading_level: 3"
    yield "      inherited_members: true"
    yield "      show_root_heading: true"
    yield "      show_root_toc_entry: true\n"


def command_line_page() -> Iterator[str]:
    root = typer.main.get_command(command_line)
    yield "# Command line\n"
    yield 'The command `rollout` comes with `pip install "./clients[cli]"`.\n'
    yield from command_section("rollout", root)


def command_section(name: str, command: Any) -> Iterator[str]:
    if name != "rollout":
        yield f"## `{name}`\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    yield "| option | meaning | default |\n| --- | --- | --- |"
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        names = parameter.human_readable_name if is_argument else ", ".join(parameter.opts)
        default = "" if parameter.default is None or callable(parameter.default) else f"`{parameter.default}`"
        yield f"| `{names}` | {cell(getattr(parameter, 'help', None) or '')} | {default} |"
    yield ""
    for sub_name, sub_command in sorted(getattr(command, "commands", {}).items()):
        yield from command_section(f"{name} {sub_name}", sub_command)


def settings_page() -> Iterator[str]:
    yield "# Settings\n"
    yield "What stands under `args` of the application in a Serve config. Unknown names are refused at the start.\n"
    yield "`KeysFile`, at the end, is the content of the file that `access.keys_file` names.\n"
    schema = ServiceSettings.model_json_schema()
    keys = KeysFile.model_json_schema()
    models = {ServiceSettings.__name__: schema, **schema.get("$defs", {}), KeysFile.__name__: keys, **keys["$defs"]}
    for name, model in models.items():
        yield f"## {name.lstrip('_')}\n"
        yield model.get("description", "")
        yield from property_table(model)


def errors_page() -> Iterator[str]:
    yield "# Errors\n"
    yield "## Of a sample\n"
    yield "A failed sample comes back with `status: error` and an `error`: kind, message, whether a retry can help.\n"
    for failure in classes_below(failures.RolloutFailure):
        yield f"### {failure.__name__}\n"
        yield f"Kind `{failure.kind}`, {'retryable' if failure.retryable else 'not retryable'}.\n"
        yield f"{inspect.getdoc(failure)}\n"
    yield "## Of a whole request\n"
    yield "A request that fails as a whole is answered with a problem document (RFC 9457).\n"
    for problem in (found for found in vars(problems).values() if isinstance(found, ProblemType)):
        yield f"### {problem.name}\n"
        yield f"Status {problem.status}, problem type `{TYPE_PREFIX}{problem.name}`: {problem.title}.\n"
    for title, base in STORE_FAILURES.items():
        yield from store_failures(title, base)
    yield "## In the Python client\n"
    for error in classes_below(rollout_client.errors.RolloutError):
        yield f"### {error.__name__}\n"
        yield f"{inspect.getdoc(error)}\n"


def store_failures(title: str, base: type[StoreFailure]) -> Iterator[str]:
    yield f"## {title}\n"
    for failure in classes_below(base):
        yield f"### {failure.__name__}\n"
        type_ = f"{TYPE_PREFIX}{failure.name}"
        yield f"Status {failure.status}, problem type `{type_}`: {failure.title}.\n"
        yield f"{inspect.getdoc(failure)}\n"


def classes_below(base: Any) -> Iterator[Any]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from classes_below(subclass)


def cell(text: str) -> str:
    """`text` in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
