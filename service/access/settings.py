"""Who may use the service: a part of its config."""

from pydantic import Field

from deployments.strict_settings import StrictSettings


class AccessSettings(StrictSettings):
    """Who may use the service."""

    keys_file: str | None = None
    """A YAML or JSON file of the keys that requests must carry, on each node that runs an ingress replica; a relative
    path is relative to the config, or with `serve run` to the repository. A change of it takes effect within two
    seconds. Without it the service asks for no key, and starts on loopback alone."""
    guarded_by: str | None = Field(default=None, min_length=4)
    """What stands in front of the service and lets only known callers through, in words. It lets the service listen on
    other addresses than loopback although it asks for no key."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names that the `Host` of a request may have, without ports; `*.example.org` stands for all below `example.org`.
    By default any, but on loopback without keys those of loopback alone: so no web page reaches the service under a
    name of its own."""
